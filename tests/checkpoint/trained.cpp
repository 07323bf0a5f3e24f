// SPDX-License-Identifier: Apache-2.0
// A job that has everything to lose: shuffles, accumulation in progress, moments, a curve,
// clipping, random numbers of every rank. tests/checkpoint/kill kills it. At its end every rank
// says a hash of all that it has come to.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/core/hash.hpp"
#include "lockstep/lockstep.hpp"

using namespace lockstep;

namespace {

using Batch = LabelledBatch<float, float>;

/// y = sum of tables, looked up by x, times scale. Every sample touches a row of each table, so
/// that gradients are cheap and everything changes with every step.
struct Tables {
  static constexpr std::size_t rows = 64, width = 512;
  using Parameters =
      ParameterList<Parameter<"first", float, rows, width>, Parameter<"second", float, rows, width>,
                    Parameter<"scale", float>>;
  using Buffers = BufferList<Buffer<"seen", float, 2>>;

  float forward(auto& step, const Batch& batch) {
    const auto scale = step.param("scale"_p);
    const auto seen = step.buffer("seen"_p);
    errors.assign(batch.size(), 0);
    sums.assign(batch.size(), 0);
    float loss = 0;
    for (std::size_t i = 0; i != batch.size(); ++i) {
      const float* first = step.param("first"_p).data_handle() + row_of(batch, i) * width;
      const float* second = step.param("second"_p).data_handle() + row_of(batch, i) * width;
      for (std::size_t j = 0; j != width; ++j) sums[i] += first[j] * second[j];
      errors[i] = scale() * sums[i] - batch.labels[i];
      loss += errors[i] * errors[i];
    }
    if (step.is_training()) {
      seen(0) += static_cast<float>(batch.size());
      seen(1) = 0.9f * seen(1) + 0.1f * loss;
    }
    return loss / static_cast<float>(batch.size());
  }

  void backward(auto& step, const Batch& batch) {
    const auto first = step.param("first"_p).data_handle();
    const auto second = step.param("second"_p).data_handle();
    const float scale = step.param("scale"_p)();
    const auto by_first = step.grad("first"_p).data_handle();
    const auto by_second = step.grad("second"_p).data_handle();
    std::memset(by_first, 0, rows * width * sizeof(float));
    std::memset(by_second, 0, rows * width * sizeof(float));
    float by_scale = 0;
    for (std::size_t i = 0; i != batch.size(); ++i) {
      const float factor = 2 * errors[i] / static_cast<float>(batch.size());
      const std::size_t at = row_of(batch, i) * width;
      by_scale += factor * sums[i];
      for (std::size_t j = at; j != at + width; ++j) {
        by_first[j] += factor * scale * second[j];
        by_second[j] += factor * scale * first[j];
      }
    }
    step.set_grad("scale"_p, by_scale);
    step.ready("second"_p);
    step.ready("first"_p);
  }

  static std::size_t row_of(const Batch& batch, std::size_t i) {
    return static_cast<std::size_t>(batch.inputs[i]) % rows;
  }

  std::vector<float> errors, sums;
};

InMemoryDataset<float, float> make_samples(std::size_t count) {
  RandomStream random(Seed{7});
  std::vector<float> inputs(count), labels(count);
  for (std::size_t i = 0; i != count; ++i) {
    inputs[i] = static_cast<float>(random.below(Tables::rows));
    labels[i] = static_cast<float>(random.normal());
  }
  return {inputs, labels};
}

std::uint64_t mixed(std::uint64_t hash, const void* data, std::size_t bytes) {
  return hash * 31 + detail::hash_of(std::string_view(static_cast<const char*>(data), bytes));
}

template <class Job>
void train(Job& job) {
  job.arguments();  // `main` has read them
  const auto samples = make_samples(256);
  job.optimizer().lr = 0.01;
  RandomStream noise = job.random();
  float drift = 0;
  job.keep("noise", noise);
  job.keep("drift", drift);
  for (auto epoch : job.epochs(4)) {
    for (auto batch : epoch.batches(samples, 2)) {
      drift = 0.9f * drift + static_cast<float>(noise.normal());
      for (float& label : batch.labels) label += 0.1f * drift;
      job.step(batch);
    }
    job.evaluate(samples, 32);
  }
  std::uint64_t hash = 1;
  const auto add = [&](auto view) {
    hash = mixed(hash, view.data_handle(), view.size() * sizeof(*view.data_handle()));
  };
  job.for_each_parameter([&](std::string_view, auto view) { add(view); });
  job.for_each_buffer([&](std::string_view, auto view) { add(view); });
  job.for_each_state([&](std::string_view, std::string_view, auto view) { add(view); });
  hash = mixed(hash, &drift, sizeof drift);
  std::printf("digest of rank %zu: %016llx, loss %.17g\n", job.rank().value(),
              static_cast<unsigned long long>(hash), job.summary().loss.value_or(0));
}

template <class... Policies>
using Job =
    Trainer<Tables, Optimizer<AdamW>, Accumulate<3>, Clip<1.0>, Schedule<Cosine>, Policies...>;
using Slices = Job<>;  // every rank has its slice of the states, and writes it
using Copies = Job<Sharding<Replicated>>;

}  // namespace

int main(int argc, char** argv) {
  if (std::string_view(argv[argc - 1]) == "shared") {
    return launch<Slices>(argc, argv, [](Slices& job) { train(job); });
  }
  return launch<Copies>(argc, argv, [](Copies& job) { train(job); });
}

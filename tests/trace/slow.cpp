// SPDX-License-Identifier: Apache-2.0
// Jobs that are slow for a known reason, for tests/trace/run, and that others look at:
//
//   slow well|buckets|rank|loader|throws --ranks N [--trace FILE] [--tensorboard FOLDER] ...
//
// `buckets` has one for each of many small parameters, on rank 1 of `rank` a forward pass takes
// longer, and the data set of `loader` is slow. `well` has nothing of that, and rank 1 of `throws`
// throws in its tenth step.
#include <chrono>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/gloo.hpp"
#include "lockstep/lockstep.hpp"
#include "lockstep/metrics.hpp"
#include "lockstep/trace.hpp"

using namespace lockstep;
using namespace std::chrono_literals;

namespace {

/// Computes for this long: ranks are more than cores in tests, so that they sleep.
void compute(std::chrono::microseconds time) { std::this_thread::sleep_for(time); }

constexpr std::size_t layers = 60;

struct Layers {
  using Parameters = ParameterList<Repeat<"layers", layers, Parameter<"weight", float, 64>>>;

  std::chrono::microseconds forward_time{3000};
  int steps_left = -1;  // until it throws, if ever

  float forward(auto&, const auto& batch) {
    if (--steps_left == 0) throw std::runtime_error("out of luck");
    compute(forward_time);
    return static_cast<float>(batch.size());
  }
  void backward(auto& step, const auto&) {
    compute(3ms);
    [&]<std::size_t... L>(std::index_sequence<L...>) {
      (write<layers - 1 - L>(step), ...);
    }(std::make_index_sequence<layers>{});
  }

 private:
  template <std::size_t L>
  static void write(auto& step) {
    constexpr auto weight = "layers"_p / at<L> / "weight"_p;
    std::fill_n(step.grad(weight).data_handle(), 64, 1e-3f);
    step.ready(weight);
  }
};

/// Samples that take long to load, or not.
struct Source {
  using batch_type = LabelledBatch<float, float>;
  std::chrono::microseconds time;

  std::size_t size() const { return 400; }
  void load(std::span<const std::size_t> indices, batch_type& out) const {
    std::this_thread::sleep_for(time);
    out.inputs.assign(indices.size(), 1);
    out.labels.assign(indices.size(), 1);
  }
};

template <class... Ps>
void train(Session& session, std::chrono::microseconds loading, bool is_slow, bool throws = false) {
  Trainer<Layers, Backend<Gloo>, Observers<Trace, TensorBoard, Prometheus>, Ps...> job(session);
  if (is_slow) job.ddp().model().forward_time = 6ms;
  if (throws) job.ddp().model().steps_left = 10;
  job.loader_options().workers = 1;
  const Source source{loading};
  job.fit(source, source, {.epochs = 2, .batch_size = 10});
}

}  // namespace

int main(int argc, char** argv) {
  return launch(argc, argv, [](Session& session) {
    const std::string kind = session.arguments().at(1);
    if (kind == "buckets") {
      train<Buckets<BucketLimits{.first = 0, .cap = 0}>>(session, 0us, false);
    } else {
      const bool is_second = session.rank() == Rank{1};
      train(session, kind == "loader" ? 12'000us : 0us, kind == "rank" && is_second,
            kind == "throws" && is_second);
    }
  });
}

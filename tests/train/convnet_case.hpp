// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The cases of convnet.json: a convolutional network with batch norms, trained by any number
/// of ranks as PyTorch trains it in one process on all their samples.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/ranks.hpp"
#include "convnet.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "reference.hpp"
#include "train/plain_mlp.hpp"

namespace convnets {

using namespace lockstep;
using ranks::Ends;
using ranks::require;
using train::wave;

/// The network of the examples, of any size, with the first values of the reference data.
struct Network : ConvNet<double, dynamic, dynamic, dynamic, dynamic, dynamic> {
  using ConvNet::ConvNet;

  void initialize(auto& initial) {
    double k = 1;
    initial.for_each_parameter([&](std::string_view name, const auto& view) {
      const double middle = name == "bn1.weight" || name == "bn2.weight" ? 1 : 0;
      for (std::size_t i = 0; i < view.size(); ++i)
        view.data_handle()[i] = middle + wave(i, k, 0.2);
      ++k;
    });
  }
};

struct Images {
  std::vector<double> inputs;
  std::vector<std::size_t> labels;
  double divisor = 0;  // of the sum of losses

  std::size_t size() const { return labels.size(); }

  void add(const Images& other) {
    inputs.insert(inputs.end(), other.inputs.begin(), other.inputs.end());
    labels.insert(labels.end(), other.labels.begin(), other.labels.end());
  }
};

/// The batch of rank r in step s.
inline Images reference_images(const Network::Sizes& sizes, std::size_t rows, std::size_t s,
                               std::size_t r) {
  Images batch{std::vector<double>(rows * sizes.channels * sizes.side * sizes.side),
               std::vector<std::size_t>(rows), static_cast<double>(rows)};
  for (std::size_t i = 0; i < batch.inputs.size(); ++i)
    batch.inputs[i] = wave(i, 100 + 10 * static_cast<double>(s) + static_cast<double>(r), 1);
  for (std::size_t j = 0; j < rows; ++j) batch.labels[j] = (7 * s + 3 * r + j) % sizes.classes;
  return batch;
}

struct Case {
  std::string name;
  Network::Sizes sizes;
  std::size_t world, batch, steps;
  double lr;
  nlohmann::json mean_loss, first_gradients, params, running;

  Case(std::size_t number, const nlohmann::json& c)
      : name("convnet.json, case " + std::to_string(number)),
        sizes{c.at("channels").at(0), c.at("side"), c.at("channels").at(1), c.at("channels").at(2),
              c.at("classes")},
        world(c.at("world")),
        batch(c.at("batch")),
        steps(c.at("steps")),
        lr(c.at("lr")),
        mean_loss(c.at("mean_loss")),
        first_gradients(c.at("first_gradients")),
        params(c.at("params")),
        running(c.at("running")) {}

  /// Of all ranks together.
  std::size_t samples() const { return world * batch; }

  /// The samples of step s that a rank of `ranks` has, whatever number of ranks the case has.
  Images share(std::size_t s, std::size_t rank, std::size_t ranks) const {
    Images all, own;
    for (std::size_t r = 0; r < world; ++r) all.add(reference_images(sizes, batch, s, r));
    const std::size_t rows = samples() / ranks;
    const std::size_t pixels = sizes.channels * sizes.side * sizes.side;
    own.inputs.assign(all.inputs.data() + rank * rows * pixels,
                      all.inputs.data() + (rank + 1) * rows * pixels);
    own.labels.assign(all.labels.data() + rank * rows, all.labels.data() + (rank + 1) * rows);
    own.divisor = static_cast<double>(rows);
    return own;
  }

  void require_figure(double have, double want, const std::string& what) const {
    if (std::abs(have - want) <= 1e-9 * std::max(std::abs(want), 1e-3)) return;
    char numbers[80];
    std::snprintf(numbers, sizeof numbers, " is %.12g, PyTorch has %.12g", have, want);
    throw std::runtime_error(name + ": " + what + numbers);
  }
  void require_figures(const nlohmann::json& all, std::string_view tensor, const auto& view,
                       const std::string& what) const {
    const std::vector<double> want = all.at(std::string(tensor));
    const std::string of = what + std::string(tensor);
    require_figure(static_cast<double>(view.size()), static_cast<double>(want.size()),
                   "the size of " + of);
    for (std::size_t i = 0; i < want.size(); ++i)
      require_figure(view.data_handle()[i], want[i], of + "[" + std::to_string(i) + "]");
  }
};

/// Every number of a job's parameters, and of its buffers.
std::vector<double> numbers_of(const auto& ddp, bool with_buffers) {
  std::vector<double> all;
  const auto add = [&](std::string_view, const auto& view) {
    for (std::size_t i = 0; i < view.size(); ++i)
      all.push_back(static_cast<double>(view.data_handle()[i]));
  };
  ddp.for_each_parameter(add);
  if (with_buffers) ddp.for_each_buffer(add);
  return all;
}

/// Trains a case on the ranks of `comm`, and throws what PyTorch has otherwise.
template <class... Ps>
void train_case(auto& comm, const Case& c) {
  DistributedDataParallel<Network, Optimizer<SGD>, Ps...> ddp(comm, Network(c.sizes));
  ddp.optimizer().lr = c.lr;
  for (std::size_t s = 0; s < c.steps; ++s) {
    const Images batch = c.share(s, comm.rank().value(), comm.world_size().value());
    auto averaged = ddp.forward(batch).backward().reduce();
    if (s == 0) {
      std::size_t tensors = 0;
      averaged.for_each_gradient([&](std::string_view name, const auto& view) {
        c.require_figures(c.first_gradients, name, view, "the first gradient of ");
        ++tensors;
      });
      require(tensors == c.first_gradients.size(), "PyTorch has another number of gradients");
    }
    double loss[] = {std::move(averaged).update()};
    comm.all_reduce(loss, Average{});
    c.require_figure(loss[0], c.mean_loss.at(s), "the loss of step " + std::to_string(s));
  }
  std::size_t tensors = 0;
  ddp.for_each_parameter([&](std::string_view name, const auto& view) {
    c.require_figures(c.params, name, view, "");
    ++tensors;
  });
  ddp.for_each_buffer([&](std::string_view name, const auto& view) {
    if constexpr (std::is_same_v<typename std::decay_t<decltype(view)>::value_type, std::int64_t>) {
      require(view.size() == 1 && view.data_handle()[0] == static_cast<std::int64_t>(c.steps),
              std::string(name) + " is not the number of steps");
    } else {
      c.require_figures(c.running, name, view, "");
      ++tensors;
    }
  });
  require(tensors == c.params.size() + c.running.size(), "PyTorch has another number of tensors");
}

/// Trains every case with every number of ranks that divides its samples, up to `most` or the
/// number that it was made with.
template <class Rendezvous, class... Ps>
void check_every_case(std::size_t most) {
  std::size_t cases = 0;
  for (const nlohmann::json& figures : reference("convnet.json")) {
    const Case c(cases++, figures);
    for (std::size_t world = 1; world <= std::max(most, c.world); ++world) {
      if (c.samples() % world != 0) continue;
      const Ends ends = ranks::run_processes<Rendezvous>(
          world, std::chrono::seconds(20), [&](auto& comm) { train_case<Ps...>(comm, c); });
      for (std::size_t r = 0; r < ends.size(); ++r)
        BOOST_TEST(ends[r] == "", world << " ranks, rank " << r << ": " << ends[r]);
    }
  }
  BOOST_TEST(cases != 0u, "convnet.json has no cases");
}

}  // namespace convnets

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ways to make a step: by hand, and by lockstep's DDP.

#include <cstddef>
#include <memory>
#include <span>

#include "lockstep/lockstep.hpp"
#include "measure.hpp"
#include "mlp.hpp"

namespace bench {

using namespace lockstep;
using Network = Mlp<float, 784, 256, 10>;

/// The loop one would write by hand for one process: model, flat arenas, one pass of SGD.
template <class Model>
class HandWritten {
 public:
  template <class Batch>
  void step(const Batch& batch) {
    step(batch, [](std::span<float>) {});
  }
  /// `reduce(gradients)` before the update.
  template <class Batch, class Reduce>
  void step(const Batch& batch, const Reduce& reduce) {
    model_.forward(step_, batch);
    model_.backward(step_, batch);
    reduce(std::span<float>(reinterpret_cast<float*>(gradients_.data()), count));
    auto* __restrict p = reinterpret_cast<float*>(parameters_.data());
    const auto* __restrict g = reinterpret_cast<const float*>(gradients_.data());
    for (std::size_t i = 0; i < count; ++i) p[i] -= rate_ * (g[i] + decay_ * p[i]);
  }

 private:
  static constexpr const auto& plan = detail::Layout<Model>::plan();
  static constexpr std::size_t count = plan.bytes / sizeof(float);
  Model model_;
  float rate_ = 0.01f;
  float decay_ = 0;
  HostArena parameters_{plan.bytes};
  HostArena gradients_{plan.bytes};
  detail::BareStep<Model> step_{model_, {parameters_.data(), gradients_.data(), nullptr}};
};

template <class Trained, class Batch>
Contestant contestant(const char* name, Trained& trained, const Batch& batch) {
  return {name, {}, [&trained, &batch](std::size_t, std::size_t iterations) {
            for (std::size_t i = 0; i < iterations; ++i) trained.step(batch);
          }};
}

template <class Model, class... Policies>
auto make_ddp(auto& comm) {
  return std::make_unique<DistributedDataParallel<Model, Policies...>>(comm);
}

}  // namespace bench

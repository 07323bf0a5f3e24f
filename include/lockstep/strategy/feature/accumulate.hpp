// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gradients of several micro-batches are added up.

#include <cstddef>
#include <span>

#include "lockstep/strategy/features.hpp"

namespace lockstep::detail {

/// A pass that adds writes into a second arena, and each gradient is added to the first arena while
/// it is still in the cache: models only ever overwrite, and nothing is ever zeroed. Where a rank
/// gives gradients away, slices are added when their buckets have landed (`GradientRing`).
struct Accumulation : Stages<Accumulation> {
  constexpr explicit Accumulation(const auto& /*gradients*/) {}

  template <class T>
  static void gradient_ready(auto& gradients, std::size_t parameter) {
    if (!gradients.pass().adds) return;
    gradients.execution().add(gradients.template summed<T>(parameter),
                              std::span<const T>(gradients.template written<T>(parameter)));
  }
};

struct AccumulationFeature {
  template <class Traits>
  static constexpr bool applies = Traits::tracks && !Traits::frees_gradients;
  template <class Traits, class Comm>
  using type = Accumulation;
};

}  // namespace lockstep::detail

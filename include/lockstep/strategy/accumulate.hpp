// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The accumulation axis: how many micro-batches make one step.

#include <cstddef>
#include <string_view>

#include "lockstep/core/choice.hpp"

namespace lockstep {

namespace axes {
struct Accumulate {
  static constexpr std::string_view name = "Accumulate";
};
}  // namespace axes

/// Gradients of `MicroBatches` batches are added locally; ranks communicate once, with the last.
template <std::size_t MicroBatches>
struct Accumulate : ValuePolicy<axes::Accumulate> {
  static constexpr std::size_t micro_batches = MicroBatches;
  static constexpr void fingerprint(Hash& hash) {
    hash.text(axes::Accumulate::name).number(MicroBatches);
  }
};

}  // namespace lockstep

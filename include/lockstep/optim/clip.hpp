// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The clip axis: the largest global gradient norm a step may take.

#include <cstdint>
#include <cuda/std/bit>
#include <limits>
#include <string_view>

#include "lockstep/core/choice.hpp"

namespace lockstep {

namespace axes {
struct Clip {
  static constexpr std::string_view name = "Clip";
};
}  // namespace axes

/// Gradients are scaled down until their norm over all parameters is at most `Norm`. An infinite
/// norm clips nothing.
template <double Norm = std::numeric_limits<double>::infinity()>
struct Clip : ValuePolicy<axes::Clip> {
  static constexpr double norm = Norm;
  static constexpr bool clips = Norm != std::numeric_limits<double>::infinity();
  static constexpr void fingerprint(Hash& hash) {
    hash.text(axes::Clip::name).number(cuda::std::bit_cast<std::uint64_t>(Norm));
  }
};

}  // namespace lockstep

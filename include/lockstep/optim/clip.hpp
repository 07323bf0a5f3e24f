// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The clip axis: the largest global gradient norm a step may take.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <type_traits>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Clip : WithName<"Clip"> {};
}  // namespace axes

/// Gradients are scaled down until their norm over all parameters is at most `Norm`, a number of
/// any type: `Clip<1>` is `Clip<1.0>`. An infinite norm clips nothing.
template <auto Norm = std::numeric_limits<double>::infinity()>
struct Clip : detail::ValuePolicy<axes::Clip> {
  static constexpr bool well_formed = std::is_arithmetic_v<decltype(Norm)>;
  static constexpr double norm = [] {
    if constexpr (well_formed) return static_cast<double>(Norm);
    return 0.0;
  }();
  static constexpr bool clips = norm != std::numeric_limits<double>::infinity();
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Clip::name).number(__builtin_bit_cast(std::uint64_t, norm));
  }
};

namespace detail {

/// The sum of squares, in double. Short blocks are summed in the elements' own arithmetic, which
/// vectorises better and loses no digits.
template <Element T>
double sum_of_squares(std::span<const T> values) {
  constexpr std::size_t block = 64;
  constexpr std::size_t lanes = 8;
  double sum = 0;
  for (std::size_t begin = 0; begin < values.size(); begin += block) {
    Accumulator<T> lane[lanes] = {};
    const std::size_t end = std::min(values.size(), begin + block);
    for (std::size_t i = begin; i < end; ++i) {
      const auto value = static_cast<Accumulator<T>>(values[i]);
      lane[(i - begin) % lanes] += value * value;
    }
    for (const auto part : lane) sum += static_cast<double>(part);
  }
  return sum;
}

/// The factor by which gradients are multiplied so that their norm is at most `max_norm`: PyTorch's
/// `clip_grad_norm_`, with its guard against a norm of zero. As there, a norm of NaN makes every
/// gradient NaN, so that a broken gradient shows.
LOCKSTEP_HOST_DEVICE constexpr double clip_factor(double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : factor;
}

}  // namespace detail

}  // namespace lockstep

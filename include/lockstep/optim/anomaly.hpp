// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The anomaly axis: what happens when a loss or a gradient is NaN or infinite.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "lockstep/core/macros.hpp"
#include "lockstep/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Anomaly {
  static constexpr std::string_view name = "Anomaly";
};
}  // namespace axes

/// A loss or gradient that is not finite ends the job, with an error that names rank, step and
/// parameter. It is looked for in the pass that updates the parameters, so some of them may hold
/// its traces by then. On a GPU the error comes from a later call, as soon as the host can know.
/// Where losses are scaled (`Precision<Mixed<Half>>`), gradients that overflow are part of the
/// method and are skipped; there the job ends when the scale has become too small to recover.
struct Stop : Choice<axes::Anomaly> {
  static constexpr std::string_view name = "Stop";
};

/// A step whose gradients have no finite norm changes nothing, on any rank, and is counted. The
/// norm of all gradients is computed before every update, as for `Clip`.
struct Skip : Choice<axes::Anomaly> {
  static constexpr std::string_view name = "Skip";
};

/// Nobody looks.
struct Ignore : Choice<axes::Anomaly> {
  static constexpr std::string_view name = "Ignore";
};

/// The policy for a loss or gradient that is NaN or infinite: `Anomaly<Skip>`.
template <class How>
struct Anomaly : detail::ChoicePolicy<axes::Anomaly, How> {};

namespace detail {

/// Zero for a number that is finite, and for no other. The difference of a number and itself can be
/// collected with `|` in a loop that vectorises, at two instructions for a whole vector.
template <std::floating_point A>
LOCKSTEP_HOST_DEVICE constexpr auto blemish(A value) {
  using Bits = std::conditional_t<sizeof(A) == 4, std::uint32_t, std::uint64_t>;
#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
  // The compiler takes the difference for zero: under -ffast-math the exponent is looked at.
  constexpr Bits exponent = __builtin_bit_cast(Bits, static_cast<A>(__builtin_huge_val()));
  return static_cast<Bits>((__builtin_bit_cast(Bits, value) & exponent) == exponent);
#else
  return __builtin_bit_cast(Bits, value - value);
#endif
}
LOCKSTEP_HOST_DEVICE constexpr bool is_finite(double value) { return blemish(value) == 0; }

/// What the update kernels of a GPU have found, in device memory.
struct AnomalyRecord {
  static constexpr unsigned long long nowhere = ~0ULL;

  std::uint64_t step = 0;                 // the first bad one, from 1; 0: there is none
  unsigned long long gradient = nowhere;  // the lowest address of a gradient that is not finite
  bool loss = false;                      // the loss was not finite
  bool scale = false;                     // the loss scale has become too small
};

/// Where kernels look and what they tell: part of a step's numbers.
struct AnomalyWatch {
  AnomalyRecord* record = nullptr;
  std::uint32_t* seen = nullptr;  // host memory, which the host reads without waiting
  const double* loss = nullptr;
};

}  // namespace detail

}  // namespace lockstep

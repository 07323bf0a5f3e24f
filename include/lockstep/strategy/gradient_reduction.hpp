// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How gradients are averaged over ranks, and the factor that is left to those that read
/// them.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "lockstep/core/element.hpp"
#include "lockstep/core/reduce_op.hpp"

namespace lockstep::detail {

/// How gradients are reduced over ranks. A folded sum is an average but for one factor, by which
/// the norm and the update multiply anyway, so that the division costs no pass over memory.
enum class GradientReduction : std::uint8_t {
  sum,
  average,
  folded_sum,
  /// A sum of many `Half` could leave its range. Each is divided before by a power of two that is
  /// not less than the number of ranks, which is exact.
  folded_sum_of_halves,
};

/// A communicator that makes an average of a sum and one more pass: `averages_by_sums`.
template <class Comm>
concept AveragingBySums = requires { requires Comm::averages_by_sums; };

template <class Traits, class Comm>
constexpr GradientReduction gradient_reduction() {
  if constexpr (Traits::sums_gradients) return GradientReduction::sum;
  // Hooks see averages, as those of PyTorch do.
  if constexpr (!AveragingBySums<Comm> || Traits::alone || Traits::is_hooked)
    return GradientReduction::average;
  const bool has_halves = []<std::size_t... K>(std::index_sequence<K...>) {
    return (
        std::is_same_v<typename Traits::template travelling<ElementOf<Traits::kinds().kinds[K]>>,
                       Half> ||
        ...);
  }(std::make_index_sequence<Traits::kinds().size>{});
  return has_halves ? GradientReduction::folded_sum_of_halves : GradientReduction::folded_sum;
}

/// The reduction as an operation. Its type comes from a value, not from the traits: nvcc writes a
/// type the way it was reached, and a job's policies cannot be written into a kernel's name.
template <GradientReduction How>
constexpr auto reduction_of_gradients(std::size_t ranks) {
  if constexpr (How == GradientReduction::average) {
    return Average{};
  } else if constexpr (How == GradientReduction::folded_sum_of_halves) {
    return PreMultipliedSum<float>(1 / static_cast<float>(std::bit_ceil(ranks)));
  } else {
    return Sum{};
  }
}

/// The factor that makes averages of the results.
constexpr double folded_factor(GradientReduction how, std::size_t ranks) {
  const auto number = static_cast<double>(ranks);
  if (how == GradientReduction::folded_sum) return 1 / number;
  if (how == GradientReduction::folded_sum_of_halves)
    return static_cast<double>(std::bit_ceil(ranks)) / number;
  return 1;
}

}  // namespace lockstep::detail

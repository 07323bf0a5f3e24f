// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The strategy axis: how replicas share the work.

#include <string_view>

#include "lockstep/core/choice.hpp"

namespace lockstep {

namespace axes {
struct ParallelStrategy {
  static constexpr std::string_view name = "ParallelStrategy";
};
}  // namespace axes

/// One rank per process or thread; gradients are averaged over ranks, bucket by bucket.
struct DDP : Choice<axes::ParallelStrategy> {
  static constexpr std::string_view name = "DDP";
};

/// One process; the batch is scattered over its devices and gradients are summed on the first.
struct DP : Choice<axes::ParallelStrategy> {
  static constexpr std::string_view name = "DP";
};

template <class Strategy>
struct ParallelStrategy : ChoicePolicy<axes::ParallelStrategy, Strategy> {};

}  // namespace lockstep

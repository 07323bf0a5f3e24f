// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The sharding axis: whether every rank keeps all optimizer state or its share.

#include <string_view>

#include "lockstep/core/choice.hpp"

namespace lockstep {

namespace axes {
struct Sharding {
  static constexpr std::string_view name = "Sharding";
};
}  // namespace axes

/// Every rank keeps everything.
struct Replicated : Choice<axes::Sharding> {
  static constexpr std::string_view name = "Replicated";
};

/// Each rank keeps and updates its share of the optimizer state (ZeRO).
struct ZeroRedundancy : PlannedChoice<axes::Sharding> {
  static constexpr std::string_view name = "ZeroRedundancy";
};

template <class How>
struct Sharding : ChoicePolicy<axes::Sharding, How> {};

}  // namespace lockstep

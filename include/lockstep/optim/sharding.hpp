// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The sharding axis: who keeps which parameters and optimizer states.

#include <string_view>

#include "lockstep/core/choice.hpp"

namespace lockstep {

namespace axes {
struct Sharding {
  static constexpr std::string_view name = "Sharding";
};
}  // namespace axes

/// Every rank keeps all parameters and states.
struct Replicated : Choice<axes::Sharding> {
  static constexpr std::string_view name = "Replicated";
};

/// Parameters live once per host; each rank keeps the states of its slice, and updates the slice in
/// the pass that reduces it. The default where memory is shared.
struct HostShared : Choice<axes::Sharding> {
  static constexpr std::string_view name = "HostShared";
};

/// Each rank keeps and updates its share of the optimizer state (ZeRO).
struct ZeroRedundancy : PlannedChoice<axes::Sharding> {
  static constexpr std::string_view name = "ZeroRedundancy";
};

/// The policy that says what each rank keeps and updates: `Sharding<Replicated>`.
template <class How>
struct Sharding : detail::ChoicePolicy<axes::Sharding, How> {};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The buffers axis: what ranks do about state that is not trained, such as running means.

#include <string_view>

#include "lockstep/core/choice.hpp"

namespace lockstep {

namespace axes {
struct Buffers {
  static constexpr std::string_view name = "Buffers";
};
}  // namespace axes

/// Rank 0's buffers go to all before every forward, as in PyTorch.
struct Broadcast : Choice<axes::Buffers> {
  static constexpr std::string_view name = "Broadcast";
};

/// Every rank keeps its own.
struct Local : Choice<axes::Buffers> {
  static constexpr std::string_view name = "Local";
};

/// Averaged over ranks.
struct Synced : PlannedChoice<axes::Buffers> {
  static constexpr std::string_view name = "Synced";
};

template <class How>
struct Buffers : ChoicePolicy<axes::Buffers, How> {};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The feed axis: which ranks of a job read its data, and how the others come to theirs.

#include <string_view>
#include <type_traits>

#include "lockstep/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Feed {
  static constexpr std::string_view name = "Feed";
};
}  // namespace axes

/// Every rank reads its own batches.
struct Own : Choice<axes::Feed> {
  static constexpr std::string_view name = "Own";
};

/// The first rank of each of the job's groups reads the batches of its group, and sends them on.
struct LeaderOfGroup : Choice<axes::Feed> {
  static constexpr std::string_view name = "LeaderOfGroup";
};

/// One rank reads all batches, the first of the first group. It scatters them to the first ranks
/// of the other groups, each of which sends on those of its group.
struct ScatterThenBroadcast : Choice<axes::Feed> {
  static constexpr std::string_view name = "ScatterThenBroadcast";
};

/// The policy that says who reads: `Feed<LeaderOfGroup>` with `Groups<Grid<8, 4>>`. Every rank has
/// the batches that it would have read itself.
template <class Choice>
struct Feed : detail::ChoicePolicy<axes::Feed, Choice> {
  /// Do some ranks get their batches from others?
  static constexpr bool sends = !std::is_same_v<Choice, Own>;
};

}  // namespace lockstep

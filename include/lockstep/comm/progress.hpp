// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The progress axis: who advances asynchronous communication.

#include <string_view>

#include "lockstep/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Progress {
  static constexpr std::string_view name = "Progress";
};
}  // namespace axes

/// Calls of the rank itself advance the calls under way: no core is taken from the model.
struct Callers : Choice<axes::Progress> {
  static constexpr std::string_view name = "Callers";
};

/// A thread advances the calls under way, for hosts with more cores than ranks.
struct HelperThread : Choice<axes::Progress> {
  static constexpr std::string_view name = "HelperThread";
};

/// The policy that says who carries asynchronous calls on: `Progress<HelperThread>`.
template <class Who>
struct Progress : detail::ChoicePolicy<axes::Progress, Who> {};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The schedule axis: how the learning rate changes from step to step.

#include <string_view>

#include "lockstep/core/choice.hpp"

namespace lockstep {

namespace axes {
struct Schedule {
  static constexpr std::string_view name = "Schedule";
};
}  // namespace axes

struct Constant : Choice<axes::Schedule> {
  static constexpr std::string_view name = "Constant";
};

/// Multiplied by a factor every so many epochs.
struct StepDecay : PlannedChoice<axes::Schedule> {
  static constexpr std::string_view name = "StepDecay";
};

/// A linear warm-up, then half a cosine down.
struct Cosine : PlannedChoice<axes::Schedule> {
  static constexpr std::string_view name = "Cosine";
};

template <class Curve>
struct Schedule : ChoicePolicy<axes::Schedule, Curve> {};

}  // namespace lockstep

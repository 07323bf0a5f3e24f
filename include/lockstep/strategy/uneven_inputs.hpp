// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The uneven-inputs axis: what happens when ranks run out of batches at different times.

#include <string_view>

#include "lockstep/core/choice.hpp"

namespace lockstep {

namespace axes {
struct UnevenInputs {
  static constexpr std::string_view name = "UnevenInputs";
};
}  // namespace axes

/// Ranks have the same number of batches; anything else is an error that names the rank.
struct Even : Choice<axes::UnevenInputs> {
  static constexpr std::string_view name = "Even";
};

/// Ranks that are done go on answering the others with zeros.
struct Join : PlannedChoice<axes::UnevenInputs> {
  static constexpr std::string_view name = "Join";
};

template <class How>
struct UnevenInputs : ChoicePolicy<axes::UnevenInputs, How> {};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The unused-parameters axis: what a parameter without a gradient means.

#include <string_view>

#include "lockstep/core/choice.hpp"

namespace lockstep {

namespace axes {
struct UnusedParameters {
  static constexpr std::string_view name = "UnusedParameters";
};
}  // namespace axes

/// An error, at once, with the names.
struct Forbid : Choice<axes::UnusedParameters> {
  static constexpr std::string_view name = "Forbid";
};

/// Counts as zero; what no rank used is left untouched by the optimizer.
struct Zero : Choice<axes::UnusedParameters> {
  static constexpr std::string_view name = "Zero";
};

/// One of the given sets of parameters is used in each step.
template <class... Sets>
struct Subgraphs : PlannedChoice<axes::UnusedParameters> {
  static constexpr std::string_view name = "Subgraphs";
};

template <class Meaning>
struct UnusedParameters : ChoicePolicy<axes::UnusedParameters, Meaning> {};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The precision axis: the types in which parameters are used and gradients travel.

#include <string_view>

#include "lockstep/core/choice.hpp"

namespace lockstep {

namespace axes {
struct Precision {
  static constexpr std::string_view name = "Precision";
};
}  // namespace axes

/// Everything in the type in which the model declares it.
struct AsDeclared : Choice<axes::Precision> {
  static constexpr std::string_view name = "AsDeclared";
};

/// Parameters, gradients in flight and buffers in types of their own, with master weights as
/// declared.
template <class Parameters, class Reduction, class Buffers>
struct Mixed : PlannedChoice<axes::Precision> {
  static constexpr std::string_view name = "Mixed";
};

template <class Types>
struct Precision : ChoicePolicy<axes::Precision, Types> {};

}  // namespace lockstep

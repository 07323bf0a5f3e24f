// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The optimizer axis: how a reduced gradient changes a parameter.

#include <string_view>

#include "lockstep/core/choice.hpp"

namespace lockstep {

namespace axes {
struct Optimizer {
  static constexpr std::string_view name = "Optimizer";
};
}  // namespace axes

struct SGD : Choice<axes::Optimizer> {
  static constexpr std::string_view name = "SGD";
};

struct Adam : Choice<axes::Optimizer> {
  static constexpr std::string_view name = "Adam";
};

struct AdamW : Choice<axes::Optimizer> {
  static constexpr std::string_view name = "AdamW";
};

template <class Rule>
struct Optimizer : ChoicePolicy<axes::Optimizer, Rule> {};

}  // namespace lockstep

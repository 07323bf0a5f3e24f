// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The execution axis: whether a step runs call by call or is replayed as one CUDA graph.

#include <string_view>

#include "lockstep/core/choice.hpp"

namespace lockstep {

namespace axes {
struct StepExecution {
  static constexpr std::string_view name = "StepExecution";
};
}  // namespace axes

/// Call by call.
struct EagerStep : ValuePolicy<axes::StepExecution> {
  static constexpr bool captures = false;
  static constexpr void fingerprint(Hash& hash) { hash.text("EagerStep"); }
};

/// Forward, backward, collectives and update captured once for each shape of batch, replayed ever
/// after. A model that cannot be captured is run call by call; a sentence says why.
struct CapturedStep : ValuePolicy<axes::StepExecution> {
  static constexpr bool captures = true;
  static constexpr void fingerprint(Hash& hash) { hash.text("CapturedStep"); }
};

}  // namespace lockstep

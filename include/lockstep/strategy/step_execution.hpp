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
  static constexpr void fingerprint(Hash& hash) { hash.text("EagerStep"); }
};

/// Forward, backward, collectives and update captured once, replayed ever after.
struct CapturedStep : ValuePolicy<axes::StepExecution> {
  static constexpr bool built() { return false; }
  static constexpr void fingerprint(Hash& hash) { hash.text("CapturedStep"); }
};

}  // namespace lockstep

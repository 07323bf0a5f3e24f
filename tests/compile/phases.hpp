// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A wrapped model for programs that take the phases of a step in the right order or not.

#include "lockstep/detail/trainer/wrappers.hpp"

namespace phases {

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3>>;
  double forward(auto&, int) { return 0; }
  void backward(auto& step, int) { step.ready("w"_p); }
};

using Ddp = DistributedDataParallel<Net>;

}  // namespace phases

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: CapturedStep makes a CUDA graph
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, CapturedStep>;
#else
using Job = Trainer<Net, EagerStep>;
#endif

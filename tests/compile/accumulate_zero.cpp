// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Accumulate<0> would never step
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Accumulate<0>>;
#else
using Job = Trainer<Net, Accumulate<1>>;
#endif

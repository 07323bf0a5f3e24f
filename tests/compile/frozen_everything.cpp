// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Frozen matches every parameter
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Frozen<"*">>;
#else
using Job = Trainer<Net, Frozen<"w">>;
#endif

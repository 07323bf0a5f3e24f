// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: one of the template arguments is not a policy
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, int, World<4>>;
#else
using Job = Trainer<Net, World<4>>;
#endif

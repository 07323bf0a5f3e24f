// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a world of zero ranks cannot train
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, World<0>>;
#else
using Job = Trainer<Net, World<1>>;
#endif

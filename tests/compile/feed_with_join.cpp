// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with UnevenInputs<Join> every rank has data of its own
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Feed<LeaderOfGroup>, Groups<Grid<4, 2>>, UnevenInputs<Join>>;
#else
using Job = Trainer<Net, Feed<LeaderOfGroup>, Groups<Grid<4, 2>>>;
#endif

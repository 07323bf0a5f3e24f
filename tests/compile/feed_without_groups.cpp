// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Feed<LeaderOfGroup> and Feed<ScatterThenBroadcast> read for the ranks of a group
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Feed<LeaderOfGroup>>;
#else
using Job = Trainer<Net, Feed<Own>>;
#endif

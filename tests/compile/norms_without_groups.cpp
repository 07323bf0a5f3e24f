// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Norms<Synced, WithinGroup> takes statistics over a rank's group
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Norms<Synced, WithinGroup>>;
#else
using Job = Trainer<Net, World<4>, Groups<Grid<4, 2>>, Norms<Synced, WithinGroup>>;
#endif

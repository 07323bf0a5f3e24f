// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with Norms<Synced> every rank's forward waits for the statistics of all
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Norms<Synced>, UnevenInputs<Join>>;
#else
using Job = Trainer<Net, Norms<Local>, UnevenInputs<Join>>;
#endif

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with UnevenInputs<Join> ranks learn from the first bucket
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Sharding<HostShared>, UnevenInputs<Join>>;
#else
using Job = Trainer<Net, Sharding<Replicated>, UnevenInputs<Join>>;
#endif

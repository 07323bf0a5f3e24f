// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: UnevenInputs<Join> is for ranks that have batches of their own
#include "lockstep/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, ParallelStrategy<DP>, UnevenInputs<Join>>;
#else
using Job = Trainer<Net, ParallelStrategy<DDP>, UnevenInputs<Join>>;
#endif

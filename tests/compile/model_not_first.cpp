// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model comes first
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<ParallelStrategy<DDP>, Net>;
#else
using Job = Trainer<Net, ParallelStrategy<DDP>>;
#endif

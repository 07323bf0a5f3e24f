// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model's Output must be an OutputOf
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
  using Output = float;  // its own business, unless outputs are to be gathered
};

#ifdef REJECT
using Job = Trainer<Net, ParallelStrategy<DP>>;
#else
using Job = Trainer<Net, ParallelStrategy<DP>, LossOnReplica>;
#endif

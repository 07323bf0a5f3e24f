// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this policy is for ranks, each with batches of its own
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, ParallelStrategy<DP>, Sharding<FullyShard>>;
#else
using Job = Trainer<Net, ParallelStrategy<DP>, Sharding<ZeroRedundancy>>;
#endif

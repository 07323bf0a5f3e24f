// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with Sharding<ZeroRedundancy, Gradients> and Sharding<FullyShard> every batch is scattered at once, and exhausted ranks
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, UnevenInputs<Join>, Sharding<ZeroRedundancy, Gradients>>;
#else
using Job = Trainer<Net, UnevenInputs<Join>, Sharding<ZeroRedundancy>>;
#endif

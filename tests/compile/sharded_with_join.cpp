// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with Sharding<ZeroRedundancy, Gradients> and Sharding<FullyShard> every batch is scattered
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Backend<Gloo>, UnevenInputs<Join>, Sharding<FullyShard>>;
#else
using Job = detail::Composed<Net, Backend<Gloo>, UnevenInputs<Join>, Sharding<ZeroRedundancy>>;
#endif

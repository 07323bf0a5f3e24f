// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a policy was given something that is not one of its choices
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Sharding<ZeroRedundancy, ByTensor>>;
#else
using Job = Trainer<Net, Sharding<ZeroRedundancy, States>>;
#endif

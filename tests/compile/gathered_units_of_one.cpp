// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a policy was given something that is not one of its choices
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Backend<Gloo>, Sharding<FullyShard, GatheredUnits<1>>>;
#else
using Job = detail::Composed<Net, Backend<Gloo>, Sharding<FullyShard, GatheredUnits<2>>>;
#endif

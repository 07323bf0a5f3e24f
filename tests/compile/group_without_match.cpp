// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: no parameter matches a pattern of Frozen, of a group or of a sub-graph
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, ParameterGroups<Named<"head.*">>>;
#else
using Job = Trainer<Net, ParameterGroups<Named<"*b">>>;
#endif

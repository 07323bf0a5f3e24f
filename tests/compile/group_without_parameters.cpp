// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: one of ParameterGroups has no parameter to train
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, ParameterGroups<NoDecay<>, Named<"b">>>;
#else
using Job = Trainer<Net, ParameterGroups<NoDecay<>, Named<"w">>>;
#endif

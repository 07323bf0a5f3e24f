// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model declares no parameters
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
struct Empty {};
using Job = Trainer<Empty>;
#else
using Job = Trainer<Net>;
#endif

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a tensor's element type is not supported
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
struct Bad {
  using Parameters = ParameterList<Parameter<"w", long double, 3>>;
};
using Job = Trainer<Bad>;
#else
struct Good {
  using Parameters = ParameterList<Parameter<"w", Half, 3>>;
};
using Job = Trainer<Good>;
#endif

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a tensor or scope has an empty name
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
struct Bad {
  using Parameters = ParameterList<Scope<"", Net::Parameters>>;
};
using Job = Trainer<Bad>;
#else
struct Good {
  using Parameters = ParameterList<Scope<"s", Net::Parameters>>;
};
using Job = Trainer<Good>;
#endif

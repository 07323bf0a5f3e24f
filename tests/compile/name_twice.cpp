// SPDX-License-Identifier: Apache-2.0
// Twice once the scopes are joined.
// expect: lockstep: a name is declared twice
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
struct Bad {
  using Parameters = ParameterList<Parameter<"s.w", float>, Scope<"s", Net::Parameters>>;
};
using Job = Trainer<Bad>;
#else
struct Good {
  using Parameters = ParameterList<Parameter<"s.x", float>, Scope<"s", Net::Parameters>>;
};
using Job = Trainer<Good>;
#endif

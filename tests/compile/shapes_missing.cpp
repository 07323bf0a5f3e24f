// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model has dynamic extents but does not say them
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
struct Bad {
  using Parameters = ParameterList<Parameter<"w", float, dynamic>>;
};
using Job = Trainer<Bad>;
#else
struct Good {
  using Parameters = ParameterList<Parameter<"w", float, dynamic>>;
  void shapes(auto& shape) const { shape("w"_p, 3); }
};
using Job = Trainer<Good>;
#endif

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a shape has another number of extents than its tensor declares
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

struct Loose {
  using Parameters = ParameterList<Parameter<"w", float, dynamic, dynamic>>;
};

#ifdef REJECT
void say(Shapes<Loose>& shape) { shape("w"_p, 3); }
#else
void say(Shapes<Loose>& shape) { shape("w"_p, 3, 4); }
#endif

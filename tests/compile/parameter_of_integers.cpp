// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a parameter of integers has no gradient; declare it as a Buffer
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
struct Bad {
  using Parameters = ParameterList<Parameter<"steps", int>>;
};
using Job = Trainer<Bad>;
#else
struct Good {
  using Parameters = Net::Parameters;
  using Buffers = BufferList<Buffer<"steps", int>>;
};
using Job = Trainer<Good>;
#endif

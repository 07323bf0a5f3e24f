// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model's Buffers must be a BufferList
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
struct Bad {
  using Parameters = Net::Parameters;
  using Buffers = Buffer<"m", bool, 1, 2, 3, 4, 5, 6, 7, 8, 9>;
};
using Job = Trainer<Bad>;
#else
struct Good {
  using Parameters = Net::Parameters;
  using Buffers = BufferList<Buffer<"m", float, 3>>;
};
using Job = Trainer<Good>;
#endif

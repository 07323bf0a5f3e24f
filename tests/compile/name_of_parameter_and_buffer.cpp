// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a name is declared twice
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
struct Bad : Net {
  using Buffers = BufferList<Buffer<"w", float>>;
};
using Job = Trainer<Bad>;
#else
struct Good : Net {
  using Buffers = BufferList<Buffer<"m", float>>;
};
using Job = Trainer<Good>;
#endif

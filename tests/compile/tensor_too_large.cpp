// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model's tensors have more bytes than memory has addresses
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
struct Bad {
  using Parameters = ParameterList<Parameter<"u", float, 1_GiB, 8_MiB>,
                                   Parameter<"v", float, 1_GiB, 8_MiB>, Parameter<"w", float, 1>>;
};
using Job = Trainer<Bad>;
#else
struct Good {
  using Parameters = ParameterList<Parameter<"u", float, 1_GiB, 8_MiB>, Parameter<"w", float, 1>>;
};
using Job = Trainer<Good>;
#endif

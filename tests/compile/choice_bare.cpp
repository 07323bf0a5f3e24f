// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a choice was given without its policy; write Backend<Shm>, not Shm
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Shm>;
#else
using Job = Trainer<Net, Backend<Shm>>;
#endif

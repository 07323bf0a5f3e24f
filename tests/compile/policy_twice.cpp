// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a policy was given twice; keep one of the two
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Backend<Shm>, World<4>, Backend<Gloo>>;
#else
using Job = Trainer<Net, Backend<Shm>, World<4>>;
#endif

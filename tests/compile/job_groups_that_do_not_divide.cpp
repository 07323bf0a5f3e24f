// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the topology of Groups<...> is not one of the job's World<N>
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, World<6>, Groups<Grid<dynamic, 4>>>;
#else
using Job = Trainer<Net, World<8>, Groups<Grid<dynamic, 4>>>;
#endif

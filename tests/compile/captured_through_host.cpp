// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with Backend<Gloo> and Backend<Hierarchical<...>> the host takes part in every reduction
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Device<Cuda>, Backend<Hierarchical<Shm, Gloo>>, CapturedStep>;
#else
using Job = detail::Composed<Net, Device<Cuda>, Backend<Hierarchical<Shm, Gloo>>>;
#endif

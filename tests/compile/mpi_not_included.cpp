// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a job with Backend<Mpi>, also between hosts only, needs #include
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Backend<Hierarchical<Shm, Mpi>>>;
#else
using Job = detail::Composed<Net, Backend<Hierarchical<Shm, Mpi>>>;
#endif

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Backend<Nccl> moves GPU memory and this is a CPU job
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Backend<Nccl>>;
#else
using Job = detail::Composed<Net, Backend<Nccl>, Device<Cuda>>;
#endif

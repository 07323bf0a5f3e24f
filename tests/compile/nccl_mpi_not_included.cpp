// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a job with Device<Cuda> and Backend<Hierarchical<Nccl, Mpi>> needs #include <lockstep/mpi_nccl.cuh>
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Device<Cuda>, Backend<Hierarchical<Nccl, Mpi>>>;
#else
using Job = detail::Composed<Net, Device<Cuda>, Backend<Hierarchical<Nccl, Mpi>>>;
#endif

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: DistributedDataParallel is ParallelStrategy<DDP>
#include "lockstep/detail/trainer/wrappers.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Wrapped = DistributedDataParallel<Net, ParallelStrategy<DP>>;
#else
using Wrapped = DataParallel<Net, Optimizer<Adam>>;
#endif

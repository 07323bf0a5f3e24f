// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with Sharding<ZeroRedundancy, Gradients> and Sharding<FullyShard> a rank gets the averages of its slices alone
#include "phases.hpp"

using namespace lockstep;
using phases::Net;

void end(DistributedDataParallel<Net, Sharding<ZeroRedundancy, Gradients>>& ddp, const int& batch) {
#ifdef REJECT
  static_cast<void>(ddp.forward(batch).backward().reduce().update());
#else
  static_cast<void>(ddp.forward(batch).backward().reduce_and_update());
#endif
}

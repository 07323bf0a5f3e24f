// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with Sharding<ZeroRedundancy, Gradients> and Sharding<FullyShard> every batch's gradients are scattered at once
#include "phases.hpp"

using namespace lockstep;
using phases::Net;

#ifdef REJECT
using Ddp = DistributedDataParallel<Net, Sharding<ZeroRedundancy, Gradients>>;
#else
using Ddp = DistributedDataParallel<Net, Sharding<ZeroRedundancy>>;
#endif

void add_up(Ddp& ddp) { static_cast<void>(ddp.no_sync()); }

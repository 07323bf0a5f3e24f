// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with World<1> and Accumulate<1> a step is the bare model
#include "phases.hpp"

using namespace lockstep;
using phases::Net;

#ifdef REJECT
using Ddp = DistributedDataParallel<Net, World<1>>;
#else
using Ddp = DistributedDataParallel<Net, World<1>, Accumulate<2>>;
#endif

void add_up(Ddp& ddp) { static_cast<void>(ddp.no_sync()); }

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this job has no groups; add a policy such as Groups<Grid<8, 4>>
#include "phases.hpp"

using namespace lockstep;
using phases::Net;

#ifdef REJECT
using Ddp = DistributedDataParallel<Net>;
#else
using Ddp = DistributedDataParallel<Net, Groups<Grid<4, 2>>>;
#endif

void meet(Ddp& ddp) { ddp.group().barrier(); }

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: ranks of this job have the same number of batches; add UnevenInputs<Join>
#include "phases.hpp"

using namespace lockstep;
using phases::Net;

#ifdef REJECT
using Ddp = DistributedDataParallel<Net>;
#else
using Ddp = DistributedDataParallel<Net, UnevenInputs<Join>>;
#endif

void train(Ddp& ddp) { auto joined = ddp.join(); }

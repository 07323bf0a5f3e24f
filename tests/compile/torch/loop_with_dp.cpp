// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this wrapper is ParallelStrategy<DDP>
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

using namespace lockstep;

#ifdef REJECT
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, ParallelStrategy<DP>>;
#else
using Wrapper =
    lockstep::torch::DistributedDataParallel<::torch::nn::Module, ParallelStrategy<DDP>>;
#endif

bool is_local(const Wrapper& ddp) { return sizeof(ddp) == 0; }

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Buffers<Synced> averages buffers where a job evaluates and saves
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

using namespace lockstep;

#ifdef REJECT
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Buffers<Synced>>;
#else
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Buffers<Local>>;
#endif

bool is_local(const Wrapper& ddp) { return sizeof(ddp) == 0; }

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: LibTorch's optimizers update all parameters on every rank
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

using namespace lockstep;

#ifdef REJECT
using Wrapper =
    lockstep::torch::DistributedDataParallel<::torch::nn::Module, Sharding<ZeroRedundancy>>;
#else
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Sharding<Replicated>>;
#endif

bool is_local(const Wrapper& ddp) { return sizeof(ddp) == 0; }

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: SkipZeroGradients leaves updates out
#include "lockstep/detail/hook/hook.hpp"
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

using namespace lockstep;

#ifdef REJECT
using Wrapper =
    lockstep::torch::DistributedDataParallel<::torch::nn::Module, Hooks<SkipZeroGradients>>;
#else
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Hooks<>>;
#endif

bool is_local(const Wrapper& ddp) { return sizeof(ddp) == 0; }

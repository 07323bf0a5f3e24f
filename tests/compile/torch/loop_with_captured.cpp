// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: CapturedStep and Precision need a step that lockstep runs
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

using namespace lockstep;

#ifdef REJECT
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, CapturedStep>;
#else
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, EagerStep>;
#endif

bool is_local(const Wrapper& ddp) { return sizeof(ddp) == 0; }

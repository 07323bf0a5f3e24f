// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: World<1> has nobody to average with
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

using namespace lockstep;

#ifdef REJECT
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, World<1>>;
#else
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, World<2>>;
#endif

bool is_local(const Wrapper& ddp) { return sizeof(ddp) == 0; }

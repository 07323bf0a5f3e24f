// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this wrapper is for the CPU
#include "lockstep/torch/distributed_data_parallel.hpp"

using namespace lockstep;

#ifdef REJECT
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Device<Cuda>>;
#else
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Device<Cpu>>;
#endif

bool is_local(const Wrapper& ddp) { return sizeof(ddp) == 0; }

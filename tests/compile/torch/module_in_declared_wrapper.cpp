// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a LibTorch module is no model by itself; wrap it in lockstep::torch::DistributedDataParallel
#include "lockstep/detail/torch/distributed_data_parallel.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"

using namespace lockstep;

using Net = ::torch::nn::Module;
#ifdef REJECT
using Wrapper = lockstep::DistributedDataParallel<Net>;
#else
using Wrapper = lockstep::torch::DistributedDataParallel<Net>;
#endif

bool is_local(const Wrapper& ddp) { return sizeof(ddp) == 0; }

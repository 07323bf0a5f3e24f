// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: here the program loads its data
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

using namespace lockstep;

#ifdef REJECT
using Wrapper =
    lockstep::torch::DistributedDataParallel<::torch::nn::Module, Sampler<Distributed, DropLast>>;
#else
using Wrapper =
    lockstep::torch::DistributedDataParallel<::torch::nn::Module, Progress<HelperThread>>;
#endif

bool is_local(const Wrapper& ddp) { return sizeof(ddp) == 0; }

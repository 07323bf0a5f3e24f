// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this wrapper leaves the update to the program
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

using namespace lockstep;

#ifdef REJECT
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Clip<1>>;
#else
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Backend<Shm>>;
#endif

bool is_local(const Wrapper& ddp) { return sizeof(ddp) == 0; }

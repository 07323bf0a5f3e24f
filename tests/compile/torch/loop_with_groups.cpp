// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: in a program's own loop Groups<...> are for Norms<Synced, WithinGroup>
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

using namespace lockstep;

#ifdef REJECT
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Groups<Grid<4, 2>>>;
#else
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Groups<Grid<4, 2>>,
                                                         Norms<Synced, WithinGroup>>;
#endif

bool is_local(const Wrapper& ddp) { return sizeof(ddp) == 0; }

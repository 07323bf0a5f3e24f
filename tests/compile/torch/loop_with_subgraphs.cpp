// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Subgraphs are for declared models
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

using namespace lockstep;

#ifdef REJECT
using Wrapper =
    lockstep::torch::DistributedDataParallel<::torch::nn::Module,
                                             UnusedParameters<Subgraphs<Subgraph<"one", "w">>>>;
#else
using Wrapper =
    lockstep::torch::DistributedDataParallel<::torch::nn::Module, UnusedParameters<Zero>>;
#endif

bool is_local(const Wrapper& ddp) { return sizeof(ddp) == 0; }

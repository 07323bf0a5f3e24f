// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Anomaly<Skip> leaves updates out
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

using namespace lockstep;

#ifdef REJECT
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Anomaly<Skip>>;
#else
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Anomaly<Ignore>>;
#endif

bool is_local(const Wrapper& ddp) { return sizeof(ddp) == 0; }

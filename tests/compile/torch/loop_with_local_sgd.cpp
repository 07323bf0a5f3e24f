// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: LocalSGD averages parameters after updates of lockstep's
#include "lockstep/detail/hook/compress_to.hpp"
#include "lockstep/detail/hook/local_sgd.hpp"
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

using namespace lockstep;

#ifdef REJECT
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Hooks<LocalSGD<8>>>;
#else
using Wrapper =
    lockstep::torch::DistributedDataParallel<::torch::nn::Module, Hooks<CompressTo<BFloat16>>>;
#endif

bool is_local(const Wrapper& ddp) { return sizeof(ddp) == 0; }

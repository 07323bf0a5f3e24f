// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: ranks of this job have the same number of batches; add UnevenInputs<Join>
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

using namespace lockstep;

using Net = ::torch::nn::Module;
#ifdef REJECT
using Wrapper = lockstep::torch::DistributedDataParallel<Net>;
#else
using Wrapper = lockstep::torch::DistributedDataParallel<Net, UnevenInputs<Join>>;
#endif

void train(Wrapper& ddp) {
  auto joined = ddp.join([] {});
}

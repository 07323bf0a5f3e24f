// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a rank that has no more batches makes the updates of the others
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

using namespace lockstep;

using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, UnevenInputs<Join>>;

void train(Wrapper& ddp) {
#ifdef REJECT
  auto joined = ddp.join();
#else
  auto joined = ddp.join([] {});
#endif
  joined.finish();
}

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a ZeroRedundancyOptimizer takes the DistributedDataParallel of its module
#include <vector>

#include "lockstep/detail/torch/zero_redundancy_optimizer.hpp"

void divide(const std::vector<at::Tensor>& parameters,
            [[maybe_unused]] lockstep::Session& session) {
#ifdef REJECT
  ::torch::optim::AdamWOptions options(1e-3);
  lockstep::torch::ZeroRedundancyOptimizer<::torch::optim::AdamW> optimizer(parameters, options);
#else
  lockstep::torch::ZeroRedundancyOptimizer<::torch::optim::AdamW> optimizer(parameters, session);
#endif
  optimizer.step();
}

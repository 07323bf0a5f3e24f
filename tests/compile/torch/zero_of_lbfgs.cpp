// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: LBFGS looks at all parameters together
#include <torch/optim/lbfgs.h>

#include "lockstep/detail/torch/zero_redundancy_optimizer.hpp"

#ifdef REJECT
using Divided = lockstep::torch::ZeroRedundancyOptimizer<::torch::optim::LBFGS>;
#else
using Divided = lockstep::torch::ZeroRedundancyOptimizer<::torch::optim::AdamW>;
#endif

bool is_local(const Divided& optimizer) { return sizeof(optimizer) == 0; }

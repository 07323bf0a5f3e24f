// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: outputs of replicas are gathered if the module's forward returns a tensor
#include "lockstep/detail/torch/data_parallel.hpp"

using namespace lockstep;

struct Net : ::torch::nn::Module {
#ifdef REJECT
  std::vector<float> forward(const at::Tensor& x);
#else
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x);
#endif
};

void use(lockstep::torch::DataParallel<Net>& dp, const at::Tensor& x) { dp(x); }

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: TorchModel takes a torch::nn::Module or a holder of one
#include "lockstep/detail/torch/model.hpp"

using namespace lockstep;

#ifdef REJECT
using Net = at::Tensor;
#else
using Net = ::torch::nn::Module;
#endif

struct Model : TorchModel<Model, Net> {
  at::Tensor loss(const at::Tensor& batch);
};

void use() { const Model model; }

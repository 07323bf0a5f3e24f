// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model has no loss(batch) for this batch that returns a tensor
#include "lockstep/detail/torch/model.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"

using namespace lockstep;

struct Model : TorchModel<Model, ::torch::nn::Module> {
#ifdef REJECT
  at::Tensor loss(const std::string& name);
#else
  at::Tensor loss(const at::Tensor& batch);
#endif
};

void train(DistributedDataParallel<Model>& ddp, const at::Tensor& batch) { ddp.step(batch); }

// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Precision<Mixed<...>> needs a GPU's arithmetic; add Device<Cuda>, or leave Precision out: a LibTorch module computes in 16 bits inside of an Autocast
#include "lockstep/detail/torch/autocast.hpp"
#include "lockstep/detail/torch/model.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Model : TorchModel<Model, ::torch::nn::Module> {
  at::Tensor loss(const at::Tensor& batch) {
    const Autocast in_bf16(at::kCPU);
    return batch.sum();
  }
};

#ifdef REJECT
using Job = Trainer<Model, Precision<Mixed<BFloat16>>>;
#else
using Job = Trainer<Model>;
#endif

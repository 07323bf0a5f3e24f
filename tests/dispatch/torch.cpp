// SPDX-License-Identifier: Apache-2.0
// Steps of LibTorch's modules on CPUs, to be looked at in machine code: tests/dispatch/run.
// LibTorch calls some functions of lockstep through its own virtual interfaces; run names those as
// roots too.
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <cstddef>

#include "lockstep/torch.hpp"
#include "lockstep/trainer.hpp"

namespace dispatch::modules {

using namespace lockstep;

struct Net : ::torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return linear->forward(norm->forward(x)); }

  ::torch::nn::BatchNorm1d norm = register_module("norm", ::torch::nn::BatchNorm1d(4));
  ::torch::nn::Linear linear = register_module("linear", ::torch::nn::Linear(4, 2));
};

struct Model : TorchModel<Model, Net> {
  static constexpr bool draws = true;
  at::Tensor loss(const TensorBatch& batch) {
    return at::cross_entropy_loss(module().forward(batch.inputs), batch.labels);
  }
};

using Job = Trainer<Model, Optimizer<AdamW>, Clip<1.0>, Norms<Synced>, UnusedParameters<Zero>>;
using Loop = lockstep::torch::DistributedDataParallel<Net>;
using LoopGradients = lockstep::detail::LoopGradients<lockstep::detail::LoopJob<Net>::replica>;

extern "C" {
double step_torch(Job& job, const TensorBatch& x) { return job.step(x); }
at::Tensor step_torch_forward(Loop& ddp, const at::Tensor& x) { return ddp.forward(x); }
void step_torch_backward(Loop& ddp, const at::Tensor& loss) { ddp.backward(loss); }
void step_torch_loop_gradient(LoopGradients& gradients, std::size_t i, const at::Tensor& of) {
  gradients(i, of);
}
}

}  // namespace dispatch::modules

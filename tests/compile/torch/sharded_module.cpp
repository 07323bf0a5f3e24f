// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with Sharding<FullyShard> a model asks for parameters unit by unit, and a LibTorch module
#include "lockstep/detail/torch/model.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net : lockstep::TorchModel<Net, ::torch::nn::Module> {
  at::Tensor loss(const at::Tensor& batch);
};

#ifdef REJECT
using Job = lockstep::Trainer<Net, Backend<Gloo>, Sharding<FullyShard>>;
#else
using Job = lockstep::detail::Composed<Net, Backend<Gloo>, Sharding<ZeroRedundancy, Gradients>>;
#endif

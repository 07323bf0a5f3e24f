// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A LibTorch module with all that a GPU must get right, and its data.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/torch.cuh"
#include "lockstep/trainer.hpp"

namespace torch_gpu {

using namespace lockstep;

inline constexpr std::int64_t columns = 12, hidden = 32, classes = 4;

/// What a check wants of the module.
struct Wishes {
  bool made_on_gpu = false;
  bool norm = false;
  double dropout = 0;
  std::optional<at::ScalarType> cast = {};
  bool fused_loss = false;  ///< lockstep's cross entropy, not LibTorch's
};

/// Values that depend on nothing but a parameter's place.
inline void set_values(::torch::nn::Module& module) {
  const at::NoGradGuard quiet;
  double place = 0;
  for (at::Tensor& parameter : module.parameters()) {
    auto flat = parameter.view({-1});
    for (std::int64_t i = 0; i != flat.numel(); ++i)
      flat[i] = 0.3 * std::sin(12.9898 * static_cast<double>(i) + ++place * 0.37);
  }
}

struct Net : ::torch::nn::Module {
  explicit Net(const Wishes& wishes = {}) : wishes(wishes) {
    first = register_module("first", ::torch::nn::Linear(columns, hidden));
    if (wishes.norm) norm = register_module("norm", ::torch::nn::BatchNorm1d(hidden));
    last = register_module("last", ::torch::nn::Linear(hidden, classes));
    set_values(*this);
    if (wishes.made_on_gpu) to(at::kCUDA);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor inner = first->forward(x);
    if (wishes.norm) inner = norm->forward(inner);
    inner = at::dropout(at::tanh(inner), wishes.dropout, is_training());
    return last->forward(inner);
  }

  Wishes wishes;
  ::torch::nn::Linear first{nullptr}, last{nullptr};
  ::torch::nn::BatchNorm1d norm{nullptr};
};

inline at::Tensor loss_of(Net& net, const at::Tensor& inputs, const at::Tensor& labels) {
  std::optional<Autocast> cast;
  if (net.wishes.cast) cast.emplace(inputs.device().type(), *net.wishes.cast);
  const at::Tensor scores = net.forward(inputs);
  if (net.wishes.fused_loss) return lockstep::torch::cross_entropy(scores, labels);
  return at::cross_entropy_loss(scores, labels);
}

/// What both models below have.
template <class Self>
struct Classifier : TorchModel<Self, Net> {
  Classifier() : Classifier(Wishes{}) {}
  explicit Classifier(const Wishes& wishes) : TorchModel<Self, Net>(wishes) {}
  at::Tensor loss(const TensorBatch& batch) {
    return torch_gpu::loss_of(this->module(), batch.inputs, batch.labels);
  }
  /// Rows that lockstep has put on the GPU.
  template <class X, class Y>
  at::Tensor loss(const DeviceBatch<X, Y>& rows) {
    return loss(as_tensors(rows));
  }
};
struct Model : Classifier<Model> {
  using Classifier::Classifier;
};
/// One whose random numbers depend on the step and the rank alone.
struct DrawingModel : Classifier<DrawingModel> {
  static constexpr bool draws = true;
  using Classifier::Classifier;
};

/// The batch of a step, of all ranks together. Every fourth is smaller.
inline TensorBatch batch_of(std::size_t step) {
  const std::int64_t rows = step % 4 == 3 ? 8 : 16;
  auto generator = at::detail::createCPUGenerator(100 + step % 3);
  return {at::randn({rows, columns}, generator),
          at::randint(classes, {rows}, generator, at::kLong)};
}
/// The share of a rank.
inline TensorBatch share_of(const TensorBatch& whole, std::size_t rank, std::size_t ranks) {
  const std::size_t rows = whole.size() / ranks;
  return whole.slice(rank * rows, rows);
}

/// Everything that a module has, as numbers.
inline std::vector<float> numbers_of(const ::torch::nn::Module& module) {
  std::vector<float> all;
  const auto add = [&](const at::Tensor& tensor) {
    const at::Tensor flat = tensor.detach().cpu().to(at::kFloat).contiguous().view({-1});
    all.insert(all.end(), flat.const_data_ptr<float>(),
               flat.const_data_ptr<float>() + flat.numel());
  };
  for (const at::Tensor& parameter : module.parameters()) add(parameter);
  for (const at::Tensor& buffer : module.buffers()) add(buffer);
  return all;
}

}  // namespace torch_gpu

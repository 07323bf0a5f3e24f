// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The backward pass of a batch norm over several ranks in operations that autograd
/// differentiates again, for gradient penalties.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/rsqrt.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/torch/norm_exchange.hpp"
#include "lockstep/torch/norm_numbers.hpp"

namespace lockstep::detail {

/// The sum of a tensor over ranks. A rank's value is part of every rank's sum, so that its gradient
/// is the sum of all ranks' gradients: the same function.
class SumOverRanks : public ::torch::autograd::Function<SumOverRanks> {
 public:
  using Exchange = std::shared_ptr<const NormExchange>;

  static at::Tensor forward(::torch::autograd::AutogradContext* context, const at::Tensor& own,
                            const Exchange& exchange) {
    context->saved_data[name] = c10::IValue::make_capsule(c10::make_intrusive<Kept>(exchange));
    at::Tensor sum = own.clone(at::MemoryFormat::Contiguous);
    const auto size = static_cast<std::size_t>(sum.numel());
    if (sum.scalar_type() == at::kDouble) {
      exchange->all_reduce(std::span<double>(sum.mutable_data_ptr<double>(), size));
    } else {
      exchange->all_reduce(std::span<float>(sum.mutable_data_ptr<float>(), size));
    }
    return sum;
  }
  static ::torch::autograd::variable_list backward(
      ::torch::autograd::AutogradContext* context,
      const ::torch::autograd::variable_list& gradients) {
    const auto kept = context->saved_data[name].toCapsule();
    return {apply(gradients[0], static_cast<const Kept&>(*kept).exchange), at::Tensor()};
  }

 private:
  struct Kept : ::torch::CustomClassHolder {
    explicit Kept(Exchange ranks) : exchange(std::move(ranks)) {}
    Exchange exchange;
  };
  static constexpr const char* name = "ranks";
};

/// The gradients of a norm as a graph over x, weight and the gradient of y. Statistics are computed
/// once more, from x. **Ranks** all, here and in the backward pass of the result. **Host** blocks,
/// or on a GPU enqueues.
inline NormGradients norm_gradient_graph(const NormTensors& norm, const at::Tensor& gradient,
                                         const NormNeeds& needs, double eps,
                                         const at::Tensor& all_count,
                                         const std::shared_ptr<const NormExchange>& exchange) {
  const at::ScalarType type =
      norm.x.is_cpu() || norm.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<std::int64_t> over;
  std::vector<std::int64_t> channels(static_cast<std::size_t>(norm.x.dim()), 1);
  channels[1] = norm.x.size(1);
  for (std::int64_t axis = 0; axis != norm.x.dim(); ++axis) {
    if (axis != 1) over.push_back(axis);
  }
  const auto sum = [&](const at::Tensor& values) { return values.sum(over); };
  const auto mean_over_ranks = [&](const at::Tensor& own) {
    return (SumOverRanks::apply(own, exchange) / all_count).view(channels);
  };
  const at::Tensor x = norm.x.to(type);
  const at::Tensor dy = gradient.to(type);
  const at::Tensor apart = x - mean_over_ranks(sum(x));
  const at::Tensor inverse = at::rsqrt(mean_over_ranks(sum(apart * apart)) + eps);
  const at::Tensor sum_dy = sum(dy);
  const at::Tensor sum_product = sum(dy * apart);
  NormGradients gradients;
  if (needs.x) {
    const at::Tensor slope = mean_over_ranks(sum_product) * inverse * inverse;
    at::Tensor dx = (dy - mean_over_ranks(sum_dy) - apart * slope) * inverse;
    if (norm.weight.defined()) dx = dx * norm.weight.to(type).view(channels);
    gradients.x = dx.to(norm.x.scalar_type());
  }
  if (needs.weight)
    gradients.weight = (sum_product * inverse.view(-1)).to(norm.weight.scalar_type());
  if (needs.bias) gradients.bias = sum_dy.to(norm.bias.scalar_type());
  return gradients;
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batch norms over several ranks on a GPU's tensors, by LibTorch's kernels. Nothing here
/// waits for the GPU, so that a step can be captured; so it is not seen either whether all ranks
/// have no values at all, in which case running statistics move towards zero.

#include <ATen/core/Tensor.h>
#include <ATen/ops/batch_norm_backward_elemt.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/batch_norm_gather_stats_with_counts.h>
#include <ATen/ops/batch_norm_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>

#include "lockstep/torch/norm_exchange.hpp"
#include "lockstep/torch/norm_numbers.hpp"

namespace lockstep::detail {

/// One norm's statistics, from its forward pass to its backward pass.
class DeviceNormPasses {
 public:
  /// y of the samples of this rank, with the statistics of all. **Ranks** all. **Host** enqueues.
  /// **Stream** LibTorch's current one, which must be the step's.
  at::Tensor forward(const NormTensors& norm, const NormNumbers& numbers,
                     const NormExchange& exchange) {
    const at::Tensor x = dense_tensor(norm.x);
    const std::int64_t channels = x.size(1);
    const auto world = static_cast<std::int64_t>(exchange.world());
    const at::ScalarType type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const auto options = x.options().dtype(type).memory_format(std::nullopt);
    const bool is_empty = x.numel() == 0;
    // A rank without values counts almost none: a zero would be divided by where it comes first,
    // and leaving ranks out needs their counts on the host.
    const std::int64_t values = x.numel() / channels;
    const at::Tensor count = is_empty ? at::full({1}, least_count, options)
                                      : at::full({1}, static_cast<double>(values), options);
    at::Tensor mean = at::zeros({is_empty ? channels : 0}, options);
    at::Tensor inverse = at::full({is_empty ? channels : 0}, 1.0, options);
    if (!is_empty) std::tie(mean, inverse) = at::batch_norm_stats(x, numbers.eps);
    const at::Tensor own = at::cat({mean, inverse, count});
    at::Tensor all = at::empty({world, 2 * channels + 1}, options);
    with_values(own, [&]<class T>(T* values, std::size_t size) {
      exchange.all_gather(std::span<const T>(values, size),
                          std::span<T>(all.mutable_data_ptr<T>(), size * exchange.world()));
    });
    counts_ = all.select(1, 2 * channels).contiguous();
    // The kernel takes running statistics of the others' type, which may be wider than the norm's.
    const at::Tensor running_mean = like(all, norm.running_mean);
    const at::Tensor running_var = like(all, norm.running_var);
    std::tie(mean_, inverse_) = at::batch_norm_gather_stats_with_counts(
        all, all.narrow(1, 0, channels).contiguous(),
        all.narrow(1, channels, channels).contiguous(), running_mean, running_var, numbers.momentum,
        numbers.eps, counts_);
    if (!running_mean.is_same(norm.running_mean)) {
      norm.running_mean.copy_(running_mean);
      norm.running_var.copy_(running_var);
    }
    if (is_empty) return at::empty_like(x);
    return at::batch_norm_elemt(x, norm.weight, norm.bias, mean_, inverse_, numbers.eps);
  }

  /// The gradients of this rank's samples. **Ranks** all. **Host** enqueues. **Stream** that of the
  /// forward pass, on which autograd runs this.
  NormGradients backward(const NormTensors& norm, const at::Tensor& gradient,
                         const NormNeeds& needs, const NormExchange& exchange) {
    const at::Tensor x = dense_tensor(norm.x);
    const at::Tensor dy = gradient.contiguous(format_of(x));
    NormGradients gradients;
    at::Tensor sums;
    if (x.numel() == 0) {
      sums = at::zeros({2, x.size(1)}, mean_.options());
      if (needs.weight) gradients.weight = at::zeros_like(norm.weight);
      if (needs.bias) gradients.bias = at::zeros_like(norm.bias);
    } else {
      const auto [sum_dy, sum_dy_xmu, weight, bias] = at::batch_norm_backward_reduce(
          dy, x, mean_, inverse_, norm.weight, needs.x, needs.weight, needs.bias);
      gradients.weight = weight;
      gradients.bias = bias;
      if (needs.x) sums = at::stack({sum_dy, sum_dy_xmu});
    }
    if (!needs.x) return gradients;
    with_values(sums, [&]<class T>(T* values, std::size_t size) {
      exchange.all_reduce(std::span<T>(values, size));
    });
    gradients.x = at::empty_like(x);
    if (x.numel() != 0) {
      gradients.x =
          at::batch_norm_backward_elemt(dy, x, mean_, inverse_, like(mean_, norm.weight),
                                        sums.select(0, 0), sums.select(0, 1), counts_.to(at::kInt));
    }
    return gradients;
  }

  /// How many values a channel has on all ranks, on the device.
  at::Tensor count() const { return counts_.to(at::kLong).sum(); }

 private:
  static constexpr double least_count = 1e-30;

  static at::Tensor like(const at::Tensor& all, const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(all.scalar_type()) : tensor;
  }

  template <class F>
  static void with_values(const at::Tensor& tensor, const F& f) {
    const auto size = static_cast<std::size_t>(tensor.numel());
    if (tensor.scalar_type() == at::kDouble) {
      f(tensor.mutable_data_ptr<double>(), size);
    } else {
      f(tensor.mutable_data_ptr<float>(), size);
    }
  }

  at::Tensor mean_;
  at::Tensor inverse_;
  at::Tensor counts_;
};

}  // namespace lockstep::detail

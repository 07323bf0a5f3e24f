// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batch norms over several ranks on tensors in host memory. Every pass over activations is a
/// kernel of LibTorch's own norm, so that it uses LibTorch's threads, vectors and types.

#include <ATen/core/Tensor.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "lockstep/norm/moments.hpp"
#include "lockstep/norm/refusals.hpp"
#include "lockstep/torch/norm_exchange.hpp"
#include "lockstep/torch/norm_numbers.hpp"

namespace lockstep::detail {

/// One norm's statistics, from its forward pass to its backward pass.
class HostNormPasses {
 public:
  /// y of the samples of this rank, with the statistics of all. **Ranks** all. **Host** blocks.
  at::Tensor forward(const NormTensors& norm, const NormNumbers& numbers,
                     const NormExchange& exchange, std::string_view name) {
    const at::Tensor x = dense_tensor(norm.x);
    const std::size_t packet = packet_doubles(static_cast<std::size_t>(x.size(1)));
    std::vector<double> packets((exchange.world() + 1) * packet);
    measure(x, packets.data());
    const std::span<double> all = std::span(packets).subspan(packet);
    exchange.all_gather(std::span<const double>(packets.data(), packet), all);
    settle(all.data(), exchange.world(), norm, numbers, name);
    if (x.numel() == 0) return at::empty_like(x);
    return normal(x, like_statistics(norm.weight), like_statistics(norm.bias));
  }

  /// The gradients of this rank's samples. Those of weight and bias are sums over them alone, which
  /// the job averages. **Ranks** all. **Host** blocks.
  NormGradients backward(const NormTensors& norm, const at::Tensor& gradient,
                         const NormNeeds& needs, const NormExchange& exchange) {
    const at::Tensor x = dense_tensor(norm.x);
    const at::Tensor dy = gradient.contiguous(format_of(x));
    // The sum of dy, and that of dy * (x - mean) * the inverse deviation.
    at::Tensor sum;
    at::Tensor product;
    if (x.numel() == 0) {
      sum = at::zeros_like(mean_);
      product = at::zeros_like(mean_);
    } else {
      std::tie(std::ignore, product, sum) =
          at::native_batch_norm_backward(dy, x, like_statistics(norm.weight), mean_, variance_,
                                         mean_, inverse_, true, eps_, {false, true, true});
    }
    NormGradients gradients;
    if (needs.x) gradients.x = input_gradient(norm, x, dy, sum, product, exchange);
    if (needs.weight) gradients.weight = product.to(norm.weight.scalar_type());
    if (needs.bias) gradients.bias = sum.to(norm.bias.scalar_type());
    return gradients;
  }

  /// How many values a channel has on all ranks.
  double count() const { return count_; }

 private:
  /// This rank's packet: the mean and the squared deviations of every channel, and their count.
  void measure(const at::Tensor& x, double* packet) {
    const std::int64_t channels = x.size(1);
    const bool is_double = x.scalar_type() == at::kDouble;
    for (at::Tensor* const statistic : {&mean_, &variance_, &inverse_})
      *statistic = at::empty({channels}, is_double ? at::kDouble : at::kFloat);
    if (x.numel() == 0) return;
    // Statistics of 16-bit numbers are floats if running ones are, which nobody reads.
    const bool is_small = x.scalar_type() != mean_.scalar_type();
    const at::Tensor typed = is_small ? at::zeros_like(mean_) : at::Tensor();
    const auto [mean, variance] = at::batch_norm_update_stats(x, typed, typed, 0);
    const std::int64_t values = x.numel() / channels;
    const auto count = static_cast<double>(values);
    read(mean, packet);
    read(variance, packet + channels);
    for (std::int64_t c = 0; c != channels; ++c) packet[channels + c] *= count;
    packet[2 * channels] = count;
  }

  /// Merges what all ranks measured, and moves the running statistics, if there are any.
  void settle(const double* packets, std::size_t world, const NormTensors& norm,
              const NormNumbers& numbers, std::string_view name) {
    const auto channels = static_cast<std::size_t>(mean_.numel());
    eps_ = numbers.eps;
    count_ = count_of_packets(packets, world, channels);
    if (count_ == 1) [[unlikely]]
      refuse_single_value(name);
    std::vector<double> means(channels), squares(channels), numbers_of(channels);
    for (std::size_t c = 0; c != channels; ++c) {
      const Moments moments = merged_packets(packets, world, channels, c);
      means[c] = moments.mean;
      squares[c] = moments.m2;
    }
    const double share = count_ == 0 ? 0 : 1 / count_;
    const auto each = [&](const at::Tensor& to, const auto& f) {
      for (std::size_t c = 0; c != channels; ++c) numbers_of[c] = f(c);
      write(numbers_of, to);
    };
    write(means, mean_);
    each(variance_, [&](std::size_t c) { return squares[c] * share; });
    each(inverse_, [&](std::size_t c) { return inverse_deviation(squares[c] * share, eps_); });
    if (!norm.running_mean.defined() || count_ == 0) return;
    std::vector<double> running(channels);
    const auto move = [&](const at::Tensor& statistic, const auto& of_batch) {
      read(statistic, running.data());
      each(statistic, [&](std::size_t c) {
        return updated_running(running[c], of_batch(c), numbers.momentum);
      });
      statistic.unsafeGetTensorImpl()->bump_version();
    };
    move(norm.running_mean, [&](std::size_t c) { return means[c]; });
    move(norm.running_var, [&](std::size_t c) { return unbiased_variance(squares[c], count_); });
  }

  /// (x - mean) * inverse deviation * weight + bias.
  at::Tensor normal(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) const {
    return std::get<0>(at::native_batch_norm(x, weight, bias, mean_, variance_, false, 0, eps_));
  }

  /// dx = (dy - mean of dy - (x - mean) * inverse^2 * mean of dy * (x - mean)) * weight * inverse,
  /// where means of dy are over all ranks. What is not dy's term is a norm of x.
  at::Tensor input_gradient(const NormTensors& norm, const at::Tensor& x, const at::Tensor& dy,
                            const at::Tensor& sum, const at::Tensor& product,
                            const NormExchange& exchange) const {
    const auto channels = static_cast<std::size_t>(mean_.numel());
    std::vector<double> sums(2 * channels), scales(channels), weights(channels, 1.0);
    read(sum, sums.data());
    read(product, sums.data() + channels);
    exchange.all_reduce(std::span(sums));
    if (x.numel() == 0) return at::empty_like(x);
    read(inverse_, scales.data());
    if (norm.weight.defined()) read(norm.weight, weights.data());
    std::vector<double> shifts(channels), slopes(channels);
    for (std::size_t c = 0; c != channels; ++c) {
      scales[c] *= weights[c];
      shifts[c] = -sums[c] / count_ * scales[c];
      slopes[c] = -sums[channels + c] / count_ * scales[c];
    }
    const at::Tensor slope = at::empty_like(mean_);
    const at::Tensor shift = at::empty_like(mean_);
    std::vector<std::int64_t> along(static_cast<std::size_t>(x.dim()), 1);
    along[1] = mean_.numel();
    const at::Tensor scale = at::empty(along, mean_.options());
    write(slopes, slope);
    write(shifts, shift);
    write(scales, scale);
    return normal(x, slope, shift).addcmul_(dy, scale.to(x.scalar_type()));
  }

  /// Weight or bias in the type of statistics.
  at::Tensor like_statistics(const at::Tensor& tensor) const {
    return tensor.defined() ? tensor.to(mean_.scalar_type()) : tensor;
  }

  /// The numbers of channels, which are few: a tensor's operation takes longer than a loop. (clang
  /// since 18 has another name for `const_data_ptr<float>` than g++, which compiled LibTorch.)
  static void read(const at::Tensor& from, double* to) {
    const auto copy = [&](const auto* values) { std::copy_n(values, from.numel(), to); };
    if (from.scalar_type() == at::kFloat && from.is_contiguous()) {
      copy(static_cast<const float*>(from.const_data_ptr()));
    } else {
      const at::Tensor wide = from.to(at::kDouble).contiguous();
      copy(static_cast<const double*>(wide.const_data_ptr()));
    }
  }
  static void write(const std::vector<double>& from, const at::Tensor& to) {
    const auto copy = [&](auto* values) {
      using T = std::remove_pointer_t<decltype(values)>;
      std::ranges::transform(from, values, [](double value) { return static_cast<T>(value); });
    };
    if (to.scalar_type() == at::kFloat && to.is_contiguous()) {
      copy(to.mutable_data_ptr<float>());
    } else if (to.scalar_type() == at::kDouble && to.is_contiguous()) {
      copy(to.mutable_data_ptr<double>());
    } else {
      to.copy_(at::tensor(at::ArrayRef<double>(from), at::kDouble).view_as(to));
    }
  }

  at::Tensor mean_;
  at::Tensor variance_;
  at::Tensor inverse_;
  double eps_ = 0;
  double count_ = 0;
};

}  // namespace lockstep::detail

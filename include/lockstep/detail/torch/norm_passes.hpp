// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The passes of a batch norm over several ranks, by LibTorch's kernels.

#include <ATen/core/Tensor.h>
#include <ATen/ops/batch_norm_backward_elemt.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/batch_norm_gather_stats_with_counts.h>
#include <ATen/ops/batch_norm_stats.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/MemoryFormat.h>

#include "lockstep/detail/norm/statistics.hpp"

namespace lockstep::detail {

/// All but x may be undefined.
struct NormTensors {
  at::Tensor x;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;
  at::Tensor running_var;
};

/// Which gradients are needed: of x, weight and bias.
using NormMask = std::array<bool, 3>;
/// The gradients of weight and bias.
using NormGradients = std::pair<at::Tensor, at::Tensor>;

/// Channels first or last, whichever the tensor is closest to.
inline at::MemoryFormat format_of(const at::Tensor& x) {
  return x.is_contiguous() ? at::MemoryFormat::Contiguous : x.suggest_memory_format();
}
inline at::Tensor dense_tensor(const at::Tensor& x) { return x.contiguous(format_of(x)); }

/// `NormWork` on host tensors. Forward: `measure`, `gather` over ranks, `finalize`, `normalise`.
/// Backward: `reduce_backward`, `sum` over ranks, `input_gradient`.
class HostTensorNorm {
 public:
  /// Packs this rank's mean and squared deviations of every channel, and their count.
  void measure(const at::Tensor& x, double, std::size_t world) {
    const std::int64_t channels = x.size(1);
    const at::ScalarType type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    for (at::Tensor* const statistic : {&mean_, &variance_, &inverse_})
      *statistic = at::empty({channels}, type);
    world_ = world;
    statistics_.reserve(static_cast<std::size_t>(channels), world);
    if (x.numel() == 0) return;
    // Unused running statistics in float make the statistics of 16-bit elements float.
    const at::Tensor typed = x.scalar_type() != type ? at::zeros_like(mean_) : at::Tensor();
    const auto [mean, variance] = at::batch_norm_update_stats(x, typed, typed, 0);
    const std::int64_t each = x.numel() / channels;
    const auto count = static_cast<double>(each);
    double* const packet = statistics_.own().data();
    read(mean, packet);
    read(variance, packet + channels);
    for (std::int64_t c = 0; c != channels; ++c) packet[channels + c] *= count;
    packet[2 * channels] = count;
  }

  void gather(const auto& exchange) {
    const std::span<const double> own = statistics_.own();
    exchange.all_gather(own.data(), statistics_.all(world_).data(), own.size(), true);
  }
  void sum(const auto& exchange) { exchange.all_reduce(sums().data(), sums().size(), true); }

  /// Merges all ranks' statistics and updates running ones; `momentum` is the batch's weight.
  void finalize(const NormTensors& norm, const BatchNormOptions& options, std::string_view name) {
    eps_ = options.eps;
    statistics_.merge(statistics_.all(world_).data(), world_, eps_, name);
    const std::size_t channels = statistics_.channels();
    std::vector<double> variances(channels);
    for (std::size_t c = 0; c != channels; ++c) variances[c] = statistics_.variance(c);
    write(statistics_.means(), mean_);
    write(variances, variance_);
    write(statistics_.inverses(), inverse_);
    if (!norm.running_mean.defined() || statistics_.count() == 0) return;
    std::vector<double> means(channels);
    read(norm.running_mean, means.data());
    read(norm.running_var, variances.data());
    statistics_.track(means.data(), variances.data(), options.momentum);
    write(means, norm.running_mean);
    write(variances, norm.running_var);
    norm.running_mean.unsafeGetTensorImpl()->bump_version();
    norm.running_var.unsafeGetTensorImpl()->bump_version();
  }

  /// (x - mean) * inverse deviation * weight + bias.
  at::Tensor normalise(const NormTensors& norm, const at::Tensor& x) const {
    return normal(x, like_statistics(norm.weight), like_statistics(norm.bias));
  }

  /// The sums of dy and of dy * (x - mean) * inverse deviation: gradients of bias and weight.
  NormGradients reduce_backward(const NormTensors& norm, const at::Tensor& x, const at::Tensor& dy,
                                const NormMask& needs) {
    at::Tensor sum = at::zeros_like(mean_);
    at::Tensor product = sum;
    if (x.numel() != 0) {
      std::tie(std::ignore, product, sum) =
          at::native_batch_norm_backward(dy, x, like_statistics(norm.weight), mean_, variance_,
                                         mean_, inverse_, true, eps_, {false, true, true});
    }
    read(sum, sums().data());
    read(product, sums().data() + statistics_.channels());
    return {needs[1] ? product.to(norm.weight.scalar_type()) : at::Tensor(),
            needs[2] ? sum.to(norm.bias.scalar_type()) : at::Tensor()};
  }

  /// dx = (dy - mean of dy - (x - mean) * inverse^2 * mean of dy * (x - mean)) * weight * inverse,
  /// where means of dy are over all ranks. What is not dy's term is a norm of x.
  at::Tensor input_gradient(const NormTensors& norm, const at::Tensor& x, const at::Tensor& dy) {
    const std::size_t channels = statistics_.channels();
    std::vector<double> scales(channels, 1.0), shifts(channels), slopes(channels);
    if (norm.weight.defined()) read(norm.weight, scales.data());
    for (std::size_t c = 0; c != channels; ++c) {
      scales[c] *= statistics_.inverses()[c];
      shifts[c] = -sums()[c] / statistics_.count() * scales[c];
      slopes[c] = -sums()[channels + c] / statistics_.count() * scales[c];
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

 private:
  std::span<double> sums() { return statistics_.sums(); }

  at::Tensor normal(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) const {
    return std::get<0>(at::native_batch_norm(x, weight, bias, mean_, variance_, false, 0, eps_));
  }

  at::Tensor like_statistics(const at::Tensor& tensor) const {
    return tensor.defined() ? tensor.to(mean_.scalar_type()) : tensor;
  }

  /// Loops are faster than tensor operations for a few channels. (clang since 18 mangles
  /// `const_data_ptr<float>` differently from g++, which compiled LibTorch.)
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

  HostStatistics statistics_;
  std::size_t world_ = 1;
  double eps_ = 0;
  at::Tensor mean_;  // for LibTorch's kernels
  at::Tensor variance_;
  at::Tensor inverse_;
};

/// The same on a GPU, by the kernels of PyTorch's `SyncBatchNorm`. The host never waits, so that a
/// step can be captured; if all ranks are empty, which the host cannot see, running statistics move
/// towards zero. **Stream** LibTorch's current one: the step's, or in backward that of forward.
class DeviceTensorNorm {
 public:
  void measure(const at::Tensor& x, double eps, std::size_t world) {
    const std::int64_t channels = x.size(1);
    const at::ScalarType type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const auto options = x.options().dtype(type).memory_format(std::nullopt);
    all_ = at::empty({static_cast<std::int64_t>(world), 2 * channels + 1}, options);
    if (x.numel() == 0) {
      // An empty rank gets a tiny count: the kernel would divide by a leading zero.
      own_ = at::cat({at::zeros({channels}, options), at::full({channels}, 1.0, options),
                      at::full({1}, 1e-30, options)});
    } else {
      const auto [mean, inverse] = at::batch_norm_stats(x, eps);
      const std::int64_t each = x.numel() / channels;
      const auto count = static_cast<double>(each);
      own_ = at::cat({mean, inverse, at::full({1}, count, options)});
    }
  }

  void gather(const auto& exchange) const {
    exchange.all_gather(own_.const_data_ptr(), all_.mutable_data_ptr(),
                        static_cast<std::size_t>(own_.numel()), own_.scalar_type() == at::kDouble);
  }
  void sum(const auto& exchange) const {
    exchange.all_reduce(sums_.mutable_data_ptr(), static_cast<std::size_t>(sums_.numel()),
                        sums_.scalar_type() == at::kDouble);
  }

  void finalize(const NormTensors& norm, const BatchNormOptions& options, std::string_view) {
    const std::int64_t channels = (all_.size(1) - 1) / 2;
    counts_ = all_.select(1, 2 * channels).contiguous();
    // The kernel needs running statistics in the type of the others, which may be wider.
    const at::Tensor running_mean = like(all_, norm.running_mean);
    const at::Tensor running_var = like(all_, norm.running_var);
    std::tie(mean_, inverse_) = at::batch_norm_gather_stats_with_counts(
        all_, all_.narrow(1, 0, channels).contiguous(),
        all_.narrow(1, channels, channels).contiguous(), running_mean, running_var,
        options.momentum, options.eps, counts_);
    if (!running_mean.is_same(norm.running_mean)) {
      norm.running_mean.copy_(running_mean);
      norm.running_var.copy_(running_var);
    }
    own_.reset();
    all_.reset();
    eps_ = options.eps;
  }

  at::Tensor normalise(const NormTensors& norm, const at::Tensor& x) const {
    return at::batch_norm_elemt(x, norm.weight, norm.bias, mean_, inverse_, eps_);
  }

  NormGradients reduce_backward(const NormTensors& norm, const at::Tensor& x, const at::Tensor& dy,
                                const NormMask& needs) {
    if (x.numel() == 0) {
      sums_ = at::zeros({2, x.size(1)}, mean_.options());
      return {needs[1] ? at::zeros_like(norm.weight) : at::Tensor(),
              needs[2] ? at::zeros_like(norm.bias) : at::Tensor()};
    }
    const auto [sum, product, weight, bias] = at::batch_norm_backward_reduce(
        dy, x, mean_, inverse_, norm.weight, needs[0], needs[1], needs[2]);
    if (needs[0]) sums_ = at::stack({sum, product});
    return {weight, bias};
  }

  at::Tensor input_gradient(const NormTensors& norm, const at::Tensor& x, const at::Tensor& dy) {
    const at::Tensor sums = std::exchange(sums_, at::Tensor());
    return at::batch_norm_backward_elemt(dy, x, mean_, inverse_, like(mean_, norm.weight),
                                         sums.select(0, 0), sums.select(0, 1),
                                         counts_.to(at::kInt));
  }

 private:
  static at::Tensor like(const at::Tensor& all, const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(all.scalar_type()) : tensor;
  }

  double eps_ = 0;
  at::Tensor own_;
  at::Tensor all_;
  at::Tensor counts_;
  at::Tensor mean_;
  at::Tensor inverse_;
  at::Tensor sums_;
};

}  // namespace lockstep::detail

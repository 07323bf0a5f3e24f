// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Norms<Synced>` for LibTorch modules: their batch norms take statistics over all ranks of
/// the job, as PyTorch's `SyncBatchNorm` does.

#include <ATen/core/Tensor.h>
#include <ATen/ops/batch_norm_native.h>
#include <ATen/ops/ones.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/library.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "lockstep/core/error.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/torch/norm_function.hpp"
#include "lockstep/torch/tensors.hpp"

namespace lockstep {

namespace detail {

/// The marks of all jobs of the process.
class NormMarks {
 public:
  static NormMarks& all() {
    static NormMarks marks;
    return marks;
  }

  /// Marks a norm of a job. It is found by its running mean, else by its weight; one that has
  /// neither is given a weight of ones, which is none of its parameters.
  template <class Norm>
  void add(Norm& norm, const std::string& name, const std::shared_ptr<NormExchange>& exchange) {
    const bool is_tag = !norm.running_mean.defined() && !norm.weight.defined();
    if (is_tag) norm.weight = at::ones({norm.options.num_features()});
    const at::Tensor& tensor = norm.running_mean.defined() ? norm.running_mean : norm.weight;
    const std::unique_lock lock(mutex_);
    marks_[tensor.unsafeGetTensorImpl()] = std::make_shared<const NormMark>(
        NormMark{name, exchange, c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                 norm.weak_from_this(), is_tag});
  }

  /// The norms of a job that has ended are plain ones again.
  void remove(const NormExchange* exchange) {
    const std::unique_lock lock(mutex_);
    std::erase_if(marks_,
                  [&](const auto& item) { return item.second->exchange.get() == exchange; });
  }

  /// The mark of the norm that has these tensors, or null.
  std::shared_ptr<const NormMark> find(const at::Tensor& running_mean,
                                       const at::Tensor& weight) const {
    const at::Tensor& tensor = running_mean.defined() ? running_mean : weight;
    if (!tensor.defined()) return nullptr;
    const std::shared_lock lock(mutex_);
    const auto found = marks_.find(tensor.unsafeGetTensorImpl());
    return found == marks_.end() ? nullptr : found->second;
  }

  std::size_t size() const {
    const std::shared_lock lock(mutex_);
    return marks_.size();
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<const NormMark>> marks_;
};

/// Ranks that do not all run this norm would wait for each other.
[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_outside(const NormMark& mark) {
  fail("Norms<Synced>",
       {"the synchronised batch norm \"", mark.name,
        "\" trains outside of a step of its job, which knows the ranks"},
       "run the module in the job's steps, or through DistributedDataParallel, or in evaluation: "
       "module->eval()");
}

/// `aten::batch_norm` for all tensors that autograd sees. A LibTorch module calls its norms' own
/// `forward`, so that they cannot be exchanged for others; what these call can.
template <class Exchange>
at::Tensor batch_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& running_mean,
                      const std::optional<at::Tensor>& running_var, bool training, double momentum,
                      double eps, bool cudnn_enabled) {
  std::optional<at::Tensor> scale = weight && weight->defined() ? weight : std::nullopt;
  if (training) {
    const at::Tensor mean = running_mean.value_or(at::Tensor());
    if (const auto mark = NormMarks::all().find(mean, scale.value_or(at::Tensor()))) {
      if (mark->is_tag) scale.reset();
      if (mark->trains()) {
        if (!mark->exchange->is_in_step()) [[unlikely]]
          refuse_outside(*mark);
        const std::optional<at::Tensor> shift = bias && bias->defined() ? bias : std::nullopt;
        return SyncedNorm<Exchange>::apply(
            x, scale, shift, c10::make_intrusive<NormPassing>(mark, NormNumbers{eps, momentum}),
            NormTensors{x, scale.value_or(at::Tensor()), shift.value_or(at::Tensor()), mean,
                        running_var.value_or(at::Tensor())});
      }
    }
  }
  return at::native::batch_norm(x, scale, bias, running_mean, running_var, training, momentum, eps,
                                cudnn_enabled);
}

/// From the first conversion on, LibTorch calls the function above.
template <class Exchange>
void override_batch_norm() {
  struct Override {
    explicit Override(c10::DispatchKey key)
        : library(::torch::Library::IMPL, "aten", key, __FILE__, __LINE__) {
      library.impl("batch_norm", TORCH_FN(batch_norm<Exchange>));
    }
    ::torch::Library library;
  };
  static const Override cpu(c10::DispatchKey::AutogradCPU);
  static const Override cuda(c10::DispatchKey::AutogradCUDA);
}

/// Marks all batch norms of a job's module, which may be one itself and need not be a shared
/// pointer's.
template <class Exchange = NormExchange>
void convert_norms(::torch::nn::Module& module, const std::shared_ptr<NormExchange>& exchange) {
  override_batch_norm<Exchange>();
  const auto visit = [&](::torch::nn::Module& inner, const std::string& name) {
    const auto mark = [&](auto* norm) {
      if (norm != nullptr) NormMarks::all().add(*norm, name, exchange);
    };
    mark(dynamic_cast<::torch::nn::BatchNorm1dImpl*>(&inner));
    mark(dynamic_cast<::torch::nn::BatchNorm2dImpl*>(&inner));
    mark(dynamic_cast<::torch::nn::BatchNorm3dImpl*>(&inner));
  };
  visit(module, module.name());
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    visit(*item.value(), item.key());
}

/// A model's member. In every pass of a training step the model says
///
///     const auto norms = norms_.open(module, step.norm_ranks());
///
/// and the batch norms of the module share their statistics with the step's ranks, which may have
/// different numbers of samples, until the end of the scope, and in the backward pass of what ran.
/// In an evaluation, and with one rank, they are what they were; the module is the same one, with
/// the same tensors, and a `clone()` is a plain module.
///
/// As in PyTorch, all ranks run the same norms in the same order, and gradients of weight and bias
/// are those of a rank's own samples, which the job averages. LibTorch's norms refuse a rank that
/// has one value per channel; PyTorch's `SyncBatchNorm` takes it.
class SyncedNorms {
 public:
  SyncedNorms() = default;
  /// A copied model has another module and other ranks.
  SyncedNorms(const SyncedNorms&) {}
  SyncedNorms(SyncedNorms&&) noexcept = default;
  SyncedNorms& operator=(const SyncedNorms&) = delete;
  SyncedNorms& operator=(SyncedNorms&&) = delete;
  ~SyncedNorms() {
    if (!exchange_) return;
    exchange_->end();
    NormMarks::all().remove(exchange_.get());
  }

  template <class Ranks>
  ValueWhile<bool> open(::torch::nn::Module& module, const Ranks& ranks) {
    if constexpr (Ranks::communicates) {
      if (!exchange_ && ranks.world() != 1) {
        exchange_ = std::make_shared<NormExchange>(ranks);
        convert_norms(module, exchange_);
      }
    }
    return {exchange_ ? exchange_->is_in_step() : nothing_, true};
  }

 private:
  std::shared_ptr<NormExchange> exchange_;
  bool nothing_ = false;  // is set where norms share nothing
};

}  // namespace detail

inline namespace torch_modules {

/// Removed: what it says, a job's policy says.
template <class M>
void convert_sync_batchnorm(M&&) {
  static_assert(sizeof(M) == 0,
                "lockstep: give the job the policy Norms<Synced>, which synchronises all batch "
                "norms of its module; there is nothing to convert");
}

}  // namespace torch_modules

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `convert_sync_batchnorm`: the batch norms of a LibTorch module take their statistics over
/// all ranks of the job, as PyTorch's `SyncBatchNorm` does.

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
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/environment.hpp"
#include "lockstep/torch/module.hpp"
#include "lockstep/torch/norm_function.hpp"
#include "lockstep/torch/tensors.hpp"

namespace lockstep {

namespace detail {

/// All marks of the process. Those of modules that are gone are dropped when more are made.
class NormMarks {
 public:
  static NormMarks& all() {
    static NormMarks marks;
    return marks;
  }

  /// Marks a norm, unless it is already. It is found by its running mean, else by its weight; one
  /// that has neither is given a weight of ones, which is none of its parameters.
  template <class Norm>
  void add(Norm& norm, std::string name) {
    const std::unique_lock lock(mutex_);
    const bool is_tag = !norm.running_mean.defined() && !norm.weight.defined();
    if (is_tag) norm.weight = at::ones({norm.options.num_features()});
    const at::Tensor& tensor = norm.running_mean.defined() ? norm.running_mean : norm.weight;
    if (marks_.contains(tensor.unsafeGetTensorImpl())) return;
    marks_.emplace(
        tensor.unsafeGetTensorImpl(),
        std::make_shared<const NormMark>(NormMark{
            std::move(name), c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
            norm.weak_from_this(), is_tag}));
  }

  /// Drops the marks of norms that are gone.
  void forget_gone() {
    const std::unique_lock lock(mutex_);
    std::erase_if(marks_, [](const auto& item) { return item.second->tensor.expired(); });
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

/// Calls `f(norm, name)` if the module is a batch norm.
template <class F>
void if_batch_norm(::torch::nn::Module& module, const std::string& name, const F& f) {
  if (auto* const one = dynamic_cast<::torch::nn::BatchNorm1dImpl*>(&module)) f(*one, name);
  if (auto* const two = dynamic_cast<::torch::nn::BatchNorm2dImpl*>(&module)) f(*two, name);
  if (auto* const three = dynamic_cast<::torch::nn::BatchNorm3dImpl*>(&module)) f(*three, name);
}

/// Calls `f(norm, name)` for every batch norm in a module, which may be one itself and need not be
/// a shared pointer's.
template <class F>
void for_each_batch_norm(::torch::nn::Module& module, const F& f) {
  if_batch_norm(module, module.name(), f);
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    if_batch_norm(*item.value(), item.key(), f);
}

/// As many ranks as the launcher has started; one where there was none.
inline std::size_t launched_world() {
  static const std::size_t world = [] {
    const auto reader = environment();
    const auto place = reader.placement();
    return place ? place->world.value() : reader.threads().value_or(1);
  }();
  return world;
}

/// Does a marked norm share its statistics with other ranks? Where it should and cannot, this
/// throws: ranks would train on statistics of their own, and nobody would see it.
inline bool shares_statistics(const NormMark& mark, const NormExchange* exchange) {
  if (exchange == nullptr) {
    if (launched_world() == 1) return false;
    fail("Norms<Synced>",
         {"the synchronised batch norm \"", mark.name,
          "\" trains outside of a step of lockstep, which knows no ranks"},
         "run the module in a TorchModel or a DistributedDataParallel with Norms<Synced>, or in "
         "evaluation: module->eval()");
  }
  if (exchange->world() == 1) return false;
  if (exchange->communicates()) return true;
  fail("convert_sync_batchnorm",
       {"the batch norm \"", mark.name, "\" is marked, and the job does not share statistics"},
       "add the policy Norms<Synced>, which converts all batch norms by itself, or do not convert "
       "the module",
       exchange->rank());
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
      const std::shared_ptr<NormExchange>& exchange = current_norm_exchange();
      if (mark->trains() && shares_statistics(*mark, exchange.get())) {
        const std::optional<at::Tensor> shift = bias && bias->defined() ? bias : std::nullopt;
        return SyncedNorm<Exchange>::apply(
            x, scale, shift,
            c10::make_intrusive<NormPassing>(exchange, mark, NormNumbers{eps, momentum}),
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

/// Marks all batch norms of a module; those that are marked stay so.
template <class Exchange = NormExchange>
void convert_norms(::torch::nn::Module& module) {
  override_batch_norm<Exchange>();
  NormMarks::all().forget_gone();
  const auto mark = [](auto& norm, const std::string& name) { NormMarks::all().add(norm, name); };
  for_each_batch_norm(module, mark);
}

/// A module, or what holds one.
template <class M>
::torch::nn::Module& base_module(M& module) {
  if constexpr (std::is_base_of_v<::torch::nn::Module, M>) {
    return module;
  } else if constexpr (requires { module.ptr(); }) {
    return *module.ptr();
  } else {
    return *module;
  }
}

}  // namespace detail

inline namespace torch_modules {

/// Makes of all `torch::nn::BatchNorm1d`, `2d` and `3d` of a module norms that take their
/// statistics over the samples of all ranks, which may have different numbers of them. In an
/// evaluation, and with one rank, they are what they were. The module is the same one, with the
/// same tensors: `net = convert_sync_batchnorm(net)` and `convert_sync_batchnorm(net)` do the same.
/// A `clone()` is a plain module again. A job with the policy `Norms<Synced>` converts its module
/// by itself; without the policy, a converted module's norms refuse to train on more than one rank.
///
/// As in PyTorch, all ranks run the same norms in the same order, and gradients of weight and bias
/// are those of a rank's own samples, which the job averages. LibTorch's norms refuse a rank that
/// has one value per channel; PyTorch's `SyncBatchNorm` takes it.
template <class M>
M convert_sync_batchnorm(M&& module) {
  detail::convert_norms(detail::base_module(module));
  return std::forward<M>(module);
}

/// How many batch norms of a module take their statistics over ranks.
template <class M>
std::size_t count_sync_batchnorm(M&& module) {
  std::size_t count = 0;
  detail::for_each_batch_norm(detail::base_module(module), [&](auto& norm, const std::string&) {
    if (detail::NormMarks::all().find(norm.running_mean, norm.weight)) ++count;
  });
  return count;
}

}  // namespace torch_modules

}  // namespace lockstep

namespace lockstep::detail {

/// A model's member. In every pass of a training step the model says
///
///     const auto norms = norms_.open(module, step);
///
/// and norms that run until the end of the scope, or in the backward pass of what ran, know the
/// step's ranks. With `Norms<Synced>` all batch norms of the module are converted.
class SyncedNorms {
 public:
  SyncedNorms() = default;
  /// A copied model has another module and other ranks.
  SyncedNorms(const SyncedNorms&) {}
  SyncedNorms(SyncedNorms&&) noexcept = default;
  SyncedNorms& operator=(const SyncedNorms&) = delete;
  SyncedNorms& operator=(SyncedNorms&&) = delete;
  ~SyncedNorms() {
    if (exchange_) exchange_->end();
  }

  template <class Step>
  NormScope open(::torch::nn::Module& module, const Step& step) {
    const auto ranks = step.norm_ranks();
    if (!exchange_) exchange_ = std::make_shared<NormExchange>();
    if constexpr (decltype(ranks)::communicates) {
      if (!std::exchange(is_converted_, true)) convert_norms(module);
    }
    exchange_->use(ranks);
    return NormScope(exchange_);
  }

 private:
  std::shared_ptr<NormExchange> exchange_;
  bool is_converted_ = false;
};

}  // namespace lockstep::detail

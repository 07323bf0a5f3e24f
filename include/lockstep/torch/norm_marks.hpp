// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The batch norms of LibTorch modules that share statistics with other ranks, found by the
/// tensors that they hand to `aten::batch_norm`.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "lockstep/torch/module_source.hpp"

namespace lockstep::detail {

/// One norm that shares its statistics.
struct NormMark {
  /// The name in the module that was converted.
  std::string name;
  /// The tensor by which the norm is found. While the mark stands, its address is no other's.
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  std::weak_ptr<const ::torch::nn::Module> module;
  /// Is the tensor a weight of ones that only serves to find the norm?
  bool is_tag = false;

  /// A norm without running statistics normalises with the batch's in an evaluation too, and then
  /// with its own rank's. A module that is no shared pointer's cannot be asked.
  bool trains() const {
    const auto norm = module.lock();
    return norm == nullptr || is_in_training(*norm);
  }
};

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

}  // namespace lockstep::detail

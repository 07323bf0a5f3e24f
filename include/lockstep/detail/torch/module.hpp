// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A LibTorch module in a model: how it is held, its unique tensors, its training modes.

#include <torch/nn/module.h>

#include <unordered_map>

#include "lockstep/detail/torch/tensors.hpp"

namespace lockstep::detail {

/// `is_training` is virtual: tests/dispatch exempts this function.
inline bool is_in_training(const ::torch::nn::Module& module) { return module.is_training(); }

/// Clones a module, or throws with advice.
template <class Contained>
std::shared_ptr<Contained> clone_of(const ::torch::nn::Module& module) {
  std::shared_ptr<::torch::nn::Module> copy;
  try {
    copy = module.clone();
  } catch (const c10::Error&) {
    fail("torch", {"module ", module.name(), " cannot be copied, and every replica needs one"},
         text({"derive it from torch::nn::Cloneable<", module.name(),
               "> and register everything in its reset()"}));
  }
  // A clone requires gradients for all parameters.
  const auto originals = module.named_parameters();
  for (auto& parameter : copy->named_parameters()) {
    if (const at::Tensor* original = originals.find(parameter.key()))
      parameter.value().set_requires_grad(original->requires_grad());
  }
  return std::dynamic_pointer_cast<Contained>(copy);
}

template <class Net>
concept ModuleOrHolder =
    std::derived_from<Net, ::torch::nn::Module> || requires { typename Net::ContainedType; };

/// A module class is kept by pointer, a holder (`TORCH_MODULE`) by value.
template <class Net>
struct ModuleSource {
  using Contained = Net;
  using Held = std::shared_ptr<Net>;
  static const std::shared_ptr<Net>& pointer(const Held& held) {
    return held;  // NOLINT(bugprone-return-const-ref-from-parameter): models keep theirs
  }
  static Net& get(const Held& held) { return *held; }
};
template <class Holder>
  requires requires { typename Holder::ContainedType; }
struct ModuleSource<Holder> {
  using Contained = typename Holder::ContainedType;
  using Held = Holder;
  static const std::shared_ptr<Contained>& pointer(const Held& held) { return held.ptr(); }
  static auto& get(auto& held) { return held; }
};

/// A tensor of a module, under its first name if modules share it.
struct ModuleTensor {
  std::string name;
  at::Tensor tensor;
  std::vector<std::string> other_names;
  /// In a copied module, tensors that were one in the original (`TensorTies`).
  std::vector<at::Tensor> copies;
  /// The element kind when it was looked up; steps may use another.
  ElementKind listed = kind_of(tensor.scalar_type());
  /// The version and address of a parameter when a job looked it up.
  std::int64_t version = 0;
  const void* data = nullptr;
};

inline std::vector<std::size_t> shape_of(const at::Tensor& tensor) {
  return {tensor.sizes().begin(), tensor.sizes().end()};
}

/// Maps other names of shared tensors to the first: `clone()` unties them, and they are tied again.
using TensorTies = std::unordered_map<std::string, std::string>;

/// The unique tensors of a dictionary, by implementation (not by memory) or by `ties`.
std::vector<ModuleTensor> unique_tensors(const auto& dictionary, const TensorTies& ties) {
  std::vector<ModuleTensor> tensors;
  std::unordered_map<const void*, std::size_t> indices;
  std::unordered_map<std::string, std::size_t> names;
  for (const auto& item : dictionary) {
    if (!item.value().defined()) continue;
    std::size_t at = tensors.size();
    if (const auto tie = ties.find(item.key()); tie != ties.end()) {
      if (const auto first = names.find(tie->second); first != names.end()) at = first->second;
    }
    const auto [found, is_new] = indices.try_emplace(item.value().unsafeGetTensorImpl(), at);
    at = found->second;
    if (at == tensors.size()) {
      tensors.push_back(ModuleTensor{item.key(), item.value(), {}, {}});
      if (!ties.empty()) names.emplace(item.key(), at);
    } else {
      tensors[at].other_names.push_back(item.key());
      if (is_new) tensors[at].copies.push_back(item.value());
    }
  }
  return tensors;
}

/// Parameters in registration order, which forward passes follow.
inline std::vector<ModuleTensor> module_parameters(const ::torch::nn::Module& module,
                                                   const TensorTies& ties = {}) {
  return unique_tensors(module.named_parameters(), ties);
}
inline std::vector<ModuleTensor> module_buffers(const ::torch::nn::Module& module,
                                                const TensorTies& ties = {}) {
  return unique_tensors(module.named_buffers(), ties);
}

/// The ties for a copy of a module, from its own `ties` and tensors.
inline TensorTies ties_of(const ::torch::nn::Module& module, const TensorTies& ties = {}) {
  TensorTies all;
  const auto add = [&](const std::vector<ModuleTensor>& tensors) {
    for (const ModuleTensor& each : tensors)
      for (const std::string& other : each.other_names) all.emplace(other, each.name);
  };
  add(module_parameters(module, ties));
  add(module_buffers(module, ties));
  return all;
}

}  // namespace lockstep::detail

namespace lockstep {

inline namespace torch_modules {

/// Puts a module and its submodules into evaluation mode, and restores each one's own mode at the
/// end: a norm that the program keeps in evaluation stays there.
class [[nodiscard]] EvaluationMode {
 public:
  explicit EvaluationMode(::torch::nn::Module& module) : module_(module) {
    was_training_ = module.is_training();
    inner_ = module.modules(/*include_self=*/false);
    for (const auto& inner : inner_) inner_training_.push_back(inner->is_training());
    module_.eval();
  }
  ~EvaluationMode() {
    // `train` of an outer module also sets the inner ones, which come later in the list.
    module_.train(was_training_);
    for (std::size_t i = 0; i != inner_.size(); ++i) inner_[i]->train(inner_training_[i]);
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  ::torch::nn::Module& module_;
  bool was_training_ = true;
  std::vector<std::shared_ptr<::torch::nn::Module>> inner_;
  std::vector<bool> inner_training_;
};

}  // namespace torch_modules

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How a model keeps its LibTorch module: by a pointer, or in a holder such as
/// `torch::nn::Sequential`.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

#include "lockstep/core/error.hpp"

namespace lockstep::detail {

/// Is a module in training? LibTorch's modules answer virtually: tests/dispatch lets a step call
/// this function through a pointer.
inline bool is_in_training(const ::torch::nn::Module& module) { return module.is_training(); }

/// A module that can be cloned, or an error that says how it can be.
template <class Contained>
std::shared_ptr<Contained> clone_of(const ::torch::nn::Module& module) {
  std::shared_ptr<::torch::nn::Module> copy;
  try {
    copy = module.clone();
  } catch (const c10::Error&) {
    throw Error("torch",
                "module " + module.name() + " cannot be copied, and every replica needs one",
                "derive it from torch::nn::Cloneable<" + module.name() +
                    "> and register everything in its reset()");
  }
  // A clone trains what its original does not, until it is told.
  const auto originals = module.named_parameters();
  for (auto& parameter : copy->named_parameters()) {
    if (const at::Tensor* original = originals.find(parameter.key()))
      parameter.value().set_requires_grad(original->requires_grad());
  }
  return std::dynamic_pointer_cast<Contained>(copy);
}

/// A module's class, or a holder of one.
template <class Net>
concept ModuleOrHolder =
    std::derived_from<Net, ::torch::nn::Module> || requires { typename Net::ContainedType; };

/// A module class, `struct Net : torch::nn::Module`.
template <class Net>
struct ModuleSource {
  using Contained = Net;
  using Held = std::shared_ptr<Net>;

  template <class... Arguments>
  static Held make(Arguments&&... arguments) {
    return std::make_shared<Net>(std::forward<Arguments>(arguments)...);
  }
  static Held hold(Held module) { return module; }
  static Held clone(const Held& module) { return clone_of<Net>(*module); }
  static Net& get(const Held& module) { return *module; }
  static ::torch::nn::Module& base(const Held& module) { return *module; }
  static bool is_shared(const Held& module) { return module.use_count() > 1; }
};

/// A holder, which `TORCH_MODULE` makes: programs write `net->forward(x)`.
template <class Holder>
  requires requires { typename Holder::ContainedType; }
struct ModuleSource<Holder> {
  using Contained = typename Holder::ContainedType;
  using Held = Holder;

  template <class... Arguments>
  static Held make(Arguments&&... arguments) {
    return Holder(std::make_shared<Contained>(std::forward<Arguments>(arguments)...));
  }
  static Held hold(std::shared_ptr<Contained> module) { return Holder(std::move(module)); }
  static Held clone(const Held& holder) { return Holder(clone_of<Contained>(*holder.ptr())); }
  static Holder& get(Held& holder) { return holder; }
  static const Holder& get(const Held& holder) {
    return holder;  // NOLINT(bugprone-return-const-ref-from-parameter): models keep their holders
  }
  static ::torch::nn::Module& base(const Held& holder) { return *holder.ptr(); }
  static bool is_shared(const Held& holder) { return holder.ptr().use_count() > 1; }
};

}  // namespace lockstep::detail

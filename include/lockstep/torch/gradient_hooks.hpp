// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Takes gradients from LibTorch's autograd the moment each is complete.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/core/utility.hpp"

namespace lockstep::detail {

/// Who gets the gradients of the backward pass under way; nobody between passes of lockstep, when
/// gradients go to `Tensor::grad` as they do without it.
class GradientReceiver {
 public:
  using Take = FunctionRef<void(std::size_t parameter, const at::Tensor& gradient)>;

  /// `take` is called for every gradient while this lives, maybe on a thread of autograd.
  class [[nodiscard]] Scope {
   public:
    Scope(GradientReceiver& receiver, const Take& take) : receiver_(receiver) {
      receiver_.take_ = &take;
    }
    ~Scope() { receiver_.take_ = nullptr; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    GradientReceiver& receiver_;
  };

  bool is_open() const { return take_ != nullptr; }
  void operator()(std::size_t parameter, const at::Tensor& gradient) const {
    (*take_)(parameter, gradient);
  }

 private:
  const Take* take_ = nullptr;
};

/// Stands before the node that would add a gradient to `Tensor::grad`. It hands the gradient on and
/// leaves nothing to add: one copy in all, and nothing is ever zeroed. (LibTorch's other hooks come
/// after the sum, or cannot keep it from being made.)
class AutogradHook : public ::torch::autograd::FunctionPreHook {
 public:
  AutogradHook(std::shared_ptr<const GradientReceiver> receiver, std::size_t parameter)
      : receiver_(std::move(receiver)), parameter_(parameter) {}

  ::torch::autograd::variable_list operator()(
      const ::torch::autograd::variable_list& gradients) override {
    if (!receiver_->is_open()) return gradients;
    (*receiver_)(parameter_, gradients[0]);
    return {at::Tensor()};
  }

 private:
  std::shared_ptr<const GradientReceiver> receiver_;
  std::size_t parameter_;
};

/// The node of a parameter, which must be kept: the tensor itself knows it only as long as somebody
/// else does. Its type is another pointer since LibTorch 2.13.
using GradientNode =
    decltype(::torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// The node of a parameter, and the parameter's number.
struct HookedNode {
  GradientNode node;
  std::size_t parameter;
};

/// Lets `receiver` have the gradients of a parameter from now on. On a GPU, hooks run on the stream
/// that is current here.
inline GradientNode hook_gradient(const at::Tensor& parameter, std::size_t number,
                                  std::shared_ptr<const GradientReceiver> receiver) {
  GradientNode node = ::torch::autograd::impl::grad_accumulator(parameter);
  node->add_pre_hook(std::make_unique<AutogradHook>(std::move(receiver), number));
  return node;
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A second module with the parameters of a first one: it runs beside it, and its gradients
/// are the first one's.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/torch/module_source.hpp"
#include "lockstep/torch/module_tensors.hpp"

namespace lockstep::detail {

/// A deep copy of a module whose parameters are tensors that depend on the module's own: they have
/// their values, in the same memory on the same device, and autograd leads gradients of any order
/// on to them, also where several of the copy's are one of the module's. Buffers are copies.
template <class Contained>
class ModuleReplica {
 public:
  ModuleReplica(const Contained& original, at::Device device)
      : device_(device), copy_(clone_of<Contained>(original)) {
    parameters_ = copy_->parameters();
    buffers_ = copy_->buffers();
    for (at::Tensor& parameter : parameters_) parameter.set_requires_grad(false);
    for (at::Tensor& buffer : buffers_) buffer.set_data(buffer.to(device));
    for (ModuleTensor& buffer : module_buffers(*copy_, ties_of(original)))
      for (at::Tensor& copy : buffer.copies) copy.set_data(buffer.tensor);
  }

  Contained& module() { return *copy_; }
  at::Device device() const { return device_; }

  /// Before a forward pass: takes values, modes and the module's place in autograd's graph anew.
  void follow(Contained& original) {
    const std::vector<at::Tensor> parameters = original.parameters();
    const std::vector<at::Tensor> buffers = original.buffers();
    if (parameters.size() != parameters_.size() || buffers.size() != buffers_.size()) [[unlikely]] {
      throw Error("DataParallel",
                  "the module has other tensors than its copy: it has got some since, or its "
                  "reset() does not register all",
                  "register everything in reset(), before the module is wrapped");
    }
    for (std::size_t i = 0; i != parameters.size(); ++i) follow(parameters_[i], parameters[i]);
    {
      // Autograd must not see it: a graph of a pass before may have the buffers, which a backward
      // pass in training does not read.
      const at::NoGradGuard quiet;
      for (std::size_t i = 0; i != buffers.size(); ++i) buffers_[i].data().copy_(buffers[i]);
    }
    const auto from = original.modules(), to = copy_->modules();
    // Outer modules come first, and set those inside.
    for (std::size_t i = 0; i != from.size(); ++i)
      if (to[i]->is_training() != from[i]->is_training()) to[i]->train(from[i]->is_training());
  }

 private:
  void follow(at::Tensor& mine, const at::Tensor& original) const {
    const bool is_near = original.device() == device_;
    const at::Tensor value = is_near ? original.view_as(original) : original.to(device_);
    mine.set_data(value.detach());
    // Updates in place after this pass are seen by its backward pass, which refuses.
    if (is_near)
      ::torch::autograd::impl::set_version_counter(
          mine, ::torch::autograd::impl::version_counter(original));
    ::torch::autograd::impl::set_gradient_edge(
        mine, value.requires_grad() ? ::torch::autograd::impl::gradient_edge(value)
                                    : ::torch::autograd::Edge());
  }

  at::Device device_;
  std::shared_ptr<Contained> copy_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> buffers_;
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A module's tensors in lockstep's memory, and the hooks that take gradients from autograd.

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

#include "lockstep/detail/core/utility.hpp"
#include "lockstep/detail/torch/arena_storages.hpp"
#include "lockstep/detail/torch/module.hpp"

namespace lockstep::detail {

/// The receiver of the current backward pass's gradients; without one they go to `Tensor::grad`.
struct GradientReceiver {
  using Take = FunctionRef<void(std::size_t parameter, const at::Tensor& gradient)>;
  /// Called for every gradient, maybe on a thread of autograd; or null.
  const Take* take = nullptr;

  void operator()(std::size_t parameter, const at::Tensor& gradient) const {
    (*take)(parameter, gradient);
  }
};

/// Runs before the node that would add a gradient to `Tensor::grad`, and leaves nothing to add: one
/// copy in all, no zeroing. (LibTorch's other hooks come after the sum or cannot prevent it.)
class AutogradHook : public ::torch::autograd::FunctionPreHook {
 public:
  AutogradHook(std::shared_ptr<const GradientReceiver> receiver, std::size_t parameter)
      : receiver_(std::move(receiver)), parameter_(parameter) {}

  ::torch::autograd::variable_list operator()(
      const ::torch::autograd::variable_list& gradients) override {
    if (receiver_->take == nullptr) return gradients;
    (*receiver_)(parameter_, gradients[0]);
    return {at::Tensor()};
  }

 private:
  std::shared_ptr<const GradientReceiver> receiver_;
  std::size_t parameter_;
};

/// A parameter's gradient accumulator, to be kept: the tensor only has a weak reference.
using GradientNode =
    decltype(::torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// Sends the gradients of a parameter to `receiver`. On a GPU, hooks run on the current stream.
inline GradientNode hook_gradient(const at::Tensor& parameter, std::size_t number,
                                  std::shared_ptr<const GradientReceiver> receiver) {
  GradientNode node = ::torch::autograd::impl::grad_accumulator(parameter);
  node->add_pre_hook(std::make_unique<AutogradHook>(std::move(receiver), number));
  return node;
}

/// Calls `f(parameter)` for every parameter with a node that a backward pass from `root` does not
/// reach. It visits the whole graph, so only steps that allow unused parameters call it.
void for_each_unreached(const at::Tensor& root, const std::vector<GradientNode>& nodes,
                        const auto& f) {
  using ::torch::autograd::Node;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> open;
  const auto visit = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  if (root.requires_grad()) visit(::torch::autograd::impl::gradient_edge(root).function.get());
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  for (std::size_t i = 0; i != nodes.size(); ++i)
    if (nodes[i] != nullptr && !seen.contains(nodes[i].get())) f(i);
}

/// The parameters and buffers of a module. From the first step on they live in lockstep's memory,
/// which every step checks: memory from `torch::load`, `to` and the like would not be trained. At
/// the end, those that others keep have memory of their own again, with their current values.
class AdoptedTensors {
 public:
  explicit AdoptedTensors(const ::torch::nn::Module& module, TensorTies ties = {})
      : ties_(std::move(ties)),
        parameters_(module_parameters(module, ties_)),
        buffers_(module_buffers(module, ties_)),
        receiver_(std::make_shared<GradientReceiver>()),
        nodes_(parameters_.size()) {
    for (ModuleTensor& parameter : parameters_) {
      parameter.version = parameter.tensor._version();
      parameter.data = parameter.tensor.const_data_ptr();
    }
  }

  const std::vector<ModuleTensor>& parameters() const { return parameters_; }
  const std::vector<ModuleTensor>& buffers() const { return buffers_; }
  GradientReceiver& receiver() { return *receiver_; }
  bool are_adopted() const { return is_adopted_; }
  /// Of all tensors in lockstep's memory that the program can see.
  ArenaStorages& storages() { return storages_; }

  struct Target {
    const void* data;
    ElementKind kind;
  };

  /// Moves all tensors to lockstep's memory; `trains(i)`: does the parameter have a gradient?
  void adopt(const auto& parameter_at, const auto& buffer_at, const auto& trains,
             at::Device device) {
    for (std::size_t i = 0; i != parameters_.size(); ++i) {
      at::Tensor& parameter = parameters_[i].tensor;
      require_unchanged(parameters_[i], device);
      if (!trains(i)) parameter.requires_grad_(false);
      move(parameter, parameter_at(i), device);
      if (trains(i)) nodes_[i] = hook_gradient(parameter, i, receiver_);
      for (at::Tensor& copy : parameters_[i].copies) tie(copy, parameter);
    }
    for (std::size_t i = 0; i != buffers_.size(); ++i) {
      move(buffers_[i].tensor, buffer_at(i), device);
      for (at::Tensor& copy : buffers_[i].copies) tie(copy, buffers_[i].tensor);
    }
    is_adopted_ = true;
  }

  /// Throws unless all tensors are where `adopt` moved them.
  void require_adopted(const auto& parameter_at, const auto& buffer_at) const {
    for (std::size_t i = 0; i != parameters_.size(); ++i) require(parameters_[i], parameter_at(i));
    for (std::size_t i = 0; i != buffers_.size(); ++i) require(buffers_[i], buffer_at(i));
  }

  /// Tells autograd that lockstep may have written parameters, so that older graphs are rejected.
  void note_update() const {
    for (const ModuleTensor& parameter : parameters_)
      ::torch::autograd::impl::bump_version(parameter.tensor);
  }

  /// The node of every parameter, null for those without gradients.
  const std::vector<GradientNode>& nodes() const { return nodes_; }

  /// Throws unless the module has the same tensors. Slower than `require_adopted`.
  void require_same(const ::torch::nn::Module& module) const {
    require_same_list(parameters_, module_parameters(module, ties_), "parameter");
    require_same_list(buffers_, module_buffers(module, ties_), "buffer");
  }

 private:
  void move(at::Tensor& tensor, const Target& target, at::Device device) {
    const bool is_bool = tensor.scalar_type() == at::kBool && target.kind == ElementKind::u8;
    const at::ScalarType type = is_bool ? at::kBool : scalar_type_of(target.kind);
    tensor.set_data(storages_.tensor_at(target.data, tensor.sizes(), type, device));
  }
  /// Ties tensors that were one in the original module: they share memory, and gradients add up.
  static void tie(at::Tensor& copy, const at::Tensor& first) {
    copy.set_requires_grad(false);
    copy.set_data(first.detach());
    ::torch::autograd::impl::set_version_counter(copy,
                                                 ::torch::autograd::impl::version_counter(first));
    if (first.requires_grad())
      ::torch::autograd::impl::set_gradient_edge(copy,
                                                 ::torch::autograd::impl::gradient_edge(first));
  }

  /// A job begins with the values of the lookup; a move to the job's device keeps them.
  static void require_unchanged(const ModuleTensor& kept, at::Device device) {
    const bool is_moved = kept.tensor.device() == device && !kept.tensor.is_cpu();
    if (kept.tensor._version() == kept.version &&
        (kept.tensor.const_data_ptr() == kept.data || is_moved)) [[likely]]
      return;
    fail("torch",
         {"the values of ", kept.name,
          " were changed after the job was made and before its first step, which would lose them"},
         "change them before the job is made, or after its first step or evaluation");
  }

  static void require(const ModuleTensor& kept, const Target& target) {
    const auto is_there = [&](const at::Tensor& tensor) {
      return tensor.const_data_ptr() == target.data || tensor.numel() == 0;
    };
    if (is_there(kept.tensor) && std::ranges::all_of(kept.copies, is_there)) [[likely]]
      return;
    fail("torch",
         {"the memory of ", kept.name,
          " was replaced after training had begun, by torch::load, to() or an assignment of its "
          "data"},
         "load and convert a module before it is wrapped, or copy values into its tensors: "
         "load_state_dict(module, path), or tensor.copy_(values) under a NoGradGuard");
  }

  static void require_same_list(const std::vector<ModuleTensor>& kept,
                                const std::vector<ModuleTensor>& now, const char* role) {
    for (std::size_t i = 0; i != kept.size() || i != now.size(); ++i) {
      const bool same = i < kept.size() && i < now.size() && kept[i].tensor.is_same(now[i].tensor);
      if (same) continue;
      const std::string& name = i < now.size() ? now[i].name : kept[i].name;
      fail("torch",
           {"the module's ", role, " ", name,
            " was registered, replaced or removed after the module was wrapped"},
           "build the whole module first");
    }
  }

  ArenaStorages storages_;  // destroyed last: by then only what the program keeps is in use
  TensorTies ties_;
  std::vector<ModuleTensor> parameters_;
  std::vector<ModuleTensor> buffers_;
  std::shared_ptr<GradientReceiver> receiver_;
  std::vector<GradientNode> nodes_;
  bool is_adopted_ = false;
};

}  // namespace lockstep::detail

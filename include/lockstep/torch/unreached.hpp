// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The parameters that a loss does not depend on, by a walk through autograd's graph.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <unordered_set>
#include <vector>

#include "lockstep/torch/gradient_hooks.hpp"

namespace lockstep::detail {

/// Calls `f(parameter)` for every hooked parameter that a backward pass from `root` will not reach.
/// The walk takes time for every node of the graph: it is made only where somebody has asked for
/// parameters to be left out.
template <class F>
void for_each_unreached(const at::Tensor& root, const std::vector<HookedNode>& hooked, const F& f) {
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
  for (const HookedNode& each : hooked)
    if (!seen.contains(each.node.get())) f(each.parameter);
}

}  // namespace lockstep::detail

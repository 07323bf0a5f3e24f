// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The parameters and buffers of a LibTorch module, each once, under its names.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/core/element.hpp"
#include "lockstep/torch/elements.hpp"

namespace lockstep::detail {

/// A tensor of a module. Modules may share one: then it has one place here, and its first name.
struct ModuleTensor {
  std::string name;
  at::Tensor tensor;
  std::vector<std::string> other_names;
  /// In a copy of a module, tensors that were one in the original (`TensorTies`).
  std::vector<at::Tensor> copies;
  /// The kind of its elements when it was looked up: in a step they may have another.
  ElementKind listed = kind_of(tensor.scalar_type());
};

/// The names that share a tensor: from each but the first to the first. LibTorch's `clone()` makes
/// of a tensor that several submodules have one for each of them; a copy's names say what they
/// were.
using TensorTies = std::unordered_map<std::string, std::string>;

/// The tensors of a dictionary, each once. Tensors are the same where their implementation is, or
/// where `ties` say so: two parameters that share memory only are two.
template <class Dictionary>
std::vector<ModuleTensor> unique_tensors(const Dictionary& dictionary, const TensorTies& ties) {
  std::vector<ModuleTensor> tensors;
  std::unordered_map<const void*, std::size_t> places;
  std::unordered_map<std::string, std::size_t> names;
  for (const auto& item : dictionary) {
    if (!item.value().defined()) continue;
    std::size_t at = tensors.size();
    if (const auto tie = ties.find(item.key()); tie != ties.end()) {
      if (const auto first = names.find(tie->second); first != names.end()) at = first->second;
    }
    const auto [place, is_new] = places.try_emplace(item.value().unsafeGetTensorImpl(), at);
    at = place->second;
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

/// Parameters in the order in which the module registers them, which forward passes follow.
inline std::vector<ModuleTensor> module_parameters(const ::torch::nn::Module& module,
                                                   const TensorTies& ties = {}) {
  return unique_tensors(module.named_parameters(), ties);
}
inline std::vector<ModuleTensor> module_buffers(const ::torch::nn::Module& module,
                                                const TensorTies& ties = {}) {
  return unique_tensors(module.named_buffers(), ties);
}

/// What a copy of a module must tie, from the original's own `ties` and tensors.
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

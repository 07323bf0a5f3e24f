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
  /// The kind of its elements when it was looked up: in a step they may have another.
  ElementKind listed = kind_of(tensor.scalar_type());
};

/// The tensors of a dictionary, each once. Tensors are the same where their implementation is: two
/// parameters that share memory only are two.
template <class Dictionary>
std::vector<ModuleTensor> unique_tensors(const Dictionary& dictionary) {
  std::vector<ModuleTensor> tensors;
  std::unordered_map<const void*, std::size_t> places;
  for (const auto& item : dictionary) {
    if (!item.value().defined()) continue;
    const auto [place, is_new] =
        places.try_emplace(item.value().unsafeGetTensorImpl(), tensors.size());
    if (is_new) {
      tensors.push_back(ModuleTensor{item.key(), item.value(), {}});
    } else {
      tensors[place->second].other_names.push_back(item.key());
    }
  }
  return tensors;
}

/// Parameters in the order in which the module registers them, which forward passes follow.
inline std::vector<ModuleTensor> module_parameters(const ::torch::nn::Module& module) {
  return unique_tensors(module.named_parameters());
}
inline std::vector<ModuleTensor> module_buffers(const ::torch::nn::Module& module) {
  return unique_tensors(module.named_buffers());
}

}  // namespace lockstep::detail

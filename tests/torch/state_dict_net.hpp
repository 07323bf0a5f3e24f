// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Modules with every kind of tensor that a state_dict can have: state_dict_peer.py has the
/// same in Python.

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "lockstep/detail/torch/module.hpp"
#include "skipped.hpp"
#include "train/python.hpp"

namespace state_dicts {

/// A layer that has its weight from another one.
struct Head : ::torch::nn::Module {
  explicit Head(const at::Tensor& tied) { weight = register_parameter("weight", tied); }
  at::Tensor weight;
};

/// Convolution, norm, and an embedding whose weight is also that of the last layer.
struct Net : ::torch::nn::Module {
  Net() {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("embed", embed);
    register_module("head", head);
    scale = register_parameter("scale", at::ones({}));
    mask = register_buffer("mask", at::ones({4}, at::kBool));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor images = at::tanh(norm->forward(conv->forward(x))).mean({2, 3});
    return at::linear(images, head->weight) * scale;
  }

  ::torch::nn::Conv2d conv{::torch::nn::Conv2dOptions(3, 8, 3)};
  ::torch::nn::BatchNorm2d norm{8};
  ::torch::nn::Embedding embed{5, 8};
  std::shared_ptr<Head> head = std::make_shared<Head>(embed->weight);
  at::Tensor scale, mask;
};

/// The same with types and strides that are seldom seen.
struct Odd : Net {
  Odd() {
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    register_parameter("small", at::zeros({3, 2}, at::kHalf));
    register_parameter("brain", at::zeros({2, 3}, at::kBFloat16));
    register_parameter("turned", at::zeros({3, 4}, at::kDouble).t());
    register_buffer("none", at::zeros({0, 3}));
    register_buffer("bytes", at::zeros({5}, at::kByte));
    register_buffer("waves", at::zeros({2}, at::kComplexFloat));
    register_buffer("count", at::zeros({}, at::kLong));
  }
};

/// The elements that a tensor of this name has in these tests.
inline at::Tensor values(const std::string& name, const at::Tensor& like) {
  const auto k = static_cast<double>(name.size());
  const at::Tensor i = at::arange(like.numel(), at::kDouble).view(like.sizes());
  if (like.scalar_type() == at::kBool) return i.remainder(2) == 0;
  return (i * 0.25 + k).to(like.scalar_type());
}
inline void fill(::torch::nn::Module& module) {
  const at::NoGradGuard quiet;
  for (auto& tensor : lockstep::detail::module_parameters(module))
    tensor.tensor.copy_(values(tensor.name, tensor.tensor));
  for (auto& tensor : lockstep::detail::module_buffers(module))
    tensor.tensor.copy_(values(tensor.name, tensor.tensor));
}
inline void clear(::torch::nn::Module& module) {
  const at::NoGradGuard quiet;
  for (auto& tensor : module.parameters()) tensor.zero_();
  for (auto& tensor : module.buffers()) tensor.zero_();
}
/// The first tensor that does not have its values, times `factor`; empty if all have.
inline std::string wrong_tensor(const ::torch::nn::Module& module, double factor = 1) {
  const auto wrong = [&](const auto& tensors) {
    for (const auto& tensor : tensors) {
      at::Tensor wanted = values(tensor.name, tensor.tensor);
      if (tensor.tensor.scalar_type() != at::kBool && factor != 1)
        wanted = (wanted * factor).to(tensor.tensor.scalar_type());
      if (!at::equal(tensor.tensor, wanted)) return tensor.name;
    }
    return std::string();
  };
  const std::string name = wrong(lockstep::detail::module_parameters(module));
  return name.empty() ? wrong(lockstep::detail::module_buffers(module)) : name;
}

/// A Python with PyTorch and safetensors, or nothing: then a test says so and is skipped.
inline std::string peer() {
  static const std::string python = [] {
    const std::string found = train::python_with_torch();
    const bool has =
        !found.empty() &&
        std::system(("LD_PRELOAD= '" + found + "' -c 'import safetensors.torch' >/dev/null 2>&1")
                        .c_str()) == 0;
    return has ? found : std::string();
  }();
  if (python.empty()) {
    say_skipped("files of PyTorch in " +
                boost::unit_test::framework::current_test_case().full_name() +
                " (no Python with PyTorch and safetensors here)");
  }
  return python;
}
inline bool ask_peer(const std::string& arguments, const std::string& path) {
  return train::ask_torch(peer(), "../torch/state_dict_peer.py", arguments, path);
}

}  // namespace state_dicts

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The modules that are stepped; bench/torch/ddp.py has the same in Python.

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/pooling.h>

#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/detail/torch/model.hpp"

namespace bench {

struct Samples {
  at::Tensor inputs;
  at::Tensor labels;
};

/// All are one type, so that lockstep's part is compiled once.
struct Net : torch::nn::Module {
  virtual at::Tensor loss(const Samples& batch) = 0;
};

struct Stepped : lockstep::TorchModel<Stepped, Net> {
  explicit Stepped(std::shared_ptr<Net> net) : TorchModel(std::move(net)) {}
  at::Tensor loss(const Samples& batch) { return module().loss(batch); }
};

/// Linear(10, 1) with a mean squared error.
struct LinearNet : Net {
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(10, 1));
  at::Tensor loss(const Samples& batch) override {
    return at::mse_loss(layer->forward(batch.inputs), batch.labels);
  }
};

struct MlpNet : Net {
  torch::nn::Linear a = register_module("a", torch::nn::Linear(784, 256));
  torch::nn::Linear b = register_module("b", torch::nn::Linear(256, 256));
  torch::nn::Linear c = register_module("c", torch::nn::Linear(256, 10));
  at::Tensor loss(const Samples& batch) override {
    const at::Tensor hidden = at::relu(b->forward(at::relu(a->forward(batch.inputs))));
    return at::cross_entropy_loss(c->forward(hidden), batch.labels);
  }
};

/// The network of examples/06_convnet.cpp.
struct ConvolutionNet : Net {
  torch::nn::Sequential layers = register_module("layers", make());
  static torch::nn::Sequential make() {
    using namespace torch::nn;
    return Sequential(Conv2d(Conv2dOptions(1, 32, 3).padding(1)), BatchNorm2d(32), ReLU(),
                      MaxPool2d(2), Conv2d(Conv2dOptions(32, 64, 3).padding(1)), BatchNorm2d(64),
                      ReLU(), MaxPool2d(2), Flatten(), Linear(64 * 7 * 7, 10));
  }
  at::Tensor loss(const Samples& batch) override {
    return at::cross_entropy_loss(layers->forward(batch.inputs), batch.labels);
  }
};

/// A block of a decoder: attention and two linear layers, norms before each.
struct BlockImpl : torch::nn::Module {
  static constexpr std::int64_t width = 128;
  static constexpr std::int64_t heads = 4;
  torch::nn::LayerNorm norm1 =
      register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  torch::nn::Linear qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(width, width));
  torch::nn::LayerNorm norm2 =
      register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  torch::nn::Linear up = register_module("up", torch::nn::Linear(width, 4 * width));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(4 * width, width));

  at::Tensor forward(at::Tensor x) {
    const auto rows = x.size(0);
    const auto tokens = x.size(1);
    const auto parts = qkv->forward(norm1->forward(x))
                           .view({rows, tokens, 3, heads, width / heads})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const at::Tensor seen =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, true);
    x = x + out->forward(seen.transpose(1, 2).reshape({rows, tokens, width}));
    return x + down->forward(at::gelu(up->forward(norm2->forward(x))));
  }
};
TORCH_MODULE(Block);

/// Two blocks over 64 tokens of 256 kinds; the embedding is the output layer too.
struct TransformerNet : Net {
  static constexpr std::int64_t tokens = 64;
  static constexpr std::int64_t kinds = 256;
  torch::nn::Embedding table =
      register_module("table", torch::nn::Embedding(kinds, BlockImpl::width));
  torch::nn::Embedding places =
      register_module("places", torch::nn::Embedding(tokens, BlockImpl::width));
  Block first = register_module("first", Block());
  Block second = register_module("second", Block());
  torch::nn::LayerNorm norm = register_module(
      "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({BlockImpl::width})));
  at::Tensor loss(const Samples& batch) override {
    const at::Tensor begin = table->forward(batch.inputs) + places->weight;
    const at::Tensor end = norm->forward(second->forward(first->forward(begin)));
    return at::cross_entropy_loss(at::linear(end, table->weight).flatten(0, 1),
                                  batch.labels.flatten());
  }
};

inline std::shared_ptr<Net> make_net(const std::string& name) {
  if (name == "linear") return std::make_shared<LinearNet>();
  if (name == "mlp") return std::make_shared<MlpNet>();
  if (name == "convnet") return std::make_shared<ConvolutionNet>();
  return std::make_shared<TransformerNet>();
}

inline Samples make_batch(const std::string& name) {
  if (name == "linear") return {at::randn({4, 10}), at::randn({4, 1})};
  if (name == "mlp") return {at::randn({32, 784}), at::randint(10, {32}, at::kLong)};
  if (name == "convnet") return {at::randn({64, 1, 28, 28}), at::randint(10, {64}, at::kLong)};
  return {at::randint(256, {8, TransformerNet::tokens}, at::kLong),
          at::randint(256, {8, TransformerNet::tokens}, at::kLong)};
}

}  // namespace bench

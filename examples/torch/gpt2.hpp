// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file GPT-2 as a LibTorch module for GPUs: learned positions, layer norms before each part, an
/// output layer that shares the embedding's weight. Attention is LibTorch's own, which takes a
/// flash kernel where there is one.

#include <ATen/ops/arange.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/torch.cuh"

namespace gpt2 {

/// The 124 million parameters of the smallest GPT-2. The vocabulary has 50,257 tokens; rows are
/// added to it so that it is a multiple of 128, which matrix products want.
struct Size {
  std::int64_t vocabulary = 50304;
  std::int64_t context = 1024;
  std::int64_t layers = 12;
  std::int64_t heads = 12;
  std::int64_t width = 768;
};

/// What a linear layer computes, its bias added inside of the product. The layer's own `forward`
/// adds it in a pass of its own where an input has three dimensions: a tenth of a step.
inline at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x) {
  return at::linear(x, layer->weight, layer->bias);
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Size& size) : heads(size.heads) {
    const std::int64_t width = size.width;
    norm1 = register_module("ln_1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    attention = register_module("attn", torch::nn::Linear(width, 3 * width));
    joined = register_module("attn_proj", torch::nn::Linear(width, width));
    norm2 = register_module("ln_2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    wide = register_module("mlp", torch::nn::Linear(width, 4 * width));
    narrow = register_module("mlp_proj", torch::nn::Linear(4 * width, width));
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor after = x + linear(joined, attend(norm1->forward(x)));
    return after + linear(narrow, at::gelu(linear(wide, norm2->forward(after)), "tanh"));
  }

  at::Tensor attend(const at::Tensor& x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = linear(attention, x).split(width, 2);
    const auto by_head = [&](const at::Tensor& part) {
      return part.view({batch, length, heads, width / heads}).transpose(1, 2);
    };
    const at::Tensor mixed = at::scaled_dot_product_attention(by_head(parts[0]), by_head(parts[1]),
                                                              by_head(parts[2]), std::nullopt, 0.0,
                                                              /*is_causal=*/true);
    return mixed.transpose(1, 2).reshape({batch, length, width});
  }

  std::int64_t heads;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear attention{nullptr}, joined{nullptr}, wide{nullptr}, narrow{nullptr};
};
TORCH_MODULE(Block);

struct Gpt2 : torch::nn::Module {
  explicit Gpt2(const Size& size = {}) : size(size) {
    tokens = register_module("wte", torch::nn::Embedding(size.vocabulary, size.width));
    positions = register_module("wpe", torch::nn::Embedding(size.context, size.width));
    blocks = register_module("h", torch::nn::ModuleList());
    for (std::int64_t i = 0; i != size.layers; ++i) blocks->push_back(Block(size));
    norm = register_module("ln_f", torch::nn::LayerNorm(torch::nn::LayerNormOptions({size.width})));
    initialize();
  }

  /// The values that GPT-2 begins with: what is added to the residual stream is smaller the more
  /// layers add to it.
  void initialize() {
    const at::NoGradGuard quiet;
    const double deep = 0.02 / std::sqrt(2.0 * static_cast<double>(size.layers));
    for (const auto& item : named_parameters()) {
      const std::string& name = item.key();
      at::Tensor value = item.value();
      if (name.find("ln_") != std::string::npos) continue;
      if (value.dim() == 1) {
        value.zero_();
      } else {
        value.normal_(0, name.find("_proj") != std::string::npos ? deep : 0.02);
      }
    }
  }

  at::Tensor forward(const at::Tensor& ids) {
    at::Tensor x = tokens->forward(ids) +
                   positions->forward(at::arange(ids.size(1), ids.options().dtype(at::kLong)));
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return at::linear(norm->forward(x), tokens->weight);
  }

  /// The mean over all places of how badly the next token is guessed.
  at::Tensor loss(const at::Tensor& ids, const at::Tensor& next) {
    const at::Tensor scores = forward(ids);
    return lockstep::torch::cross_entropy(scores.view({-1, scores.size(-1)}), next.view({-1}));
  }

  Size size;
  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};

}  // namespace gpt2

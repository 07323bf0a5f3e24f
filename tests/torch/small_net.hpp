// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A small LibTorch module, its batches, and what tests of it have in common.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/optimizer.h>
#include <torch/utils.h>

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/ranks.hpp"

namespace torch_net {

using ranks::require;

/// Two layers, one between that is not trained, and one that is used only when it is asked for.
struct Net : torch::nn::Cloneable<Net> {
  torch::nn::Linear in{nullptr}, frozen{nullptr}, out{nullptr}, extra{nullptr};

  void reset() override {
    // A module that is called "in" cannot be loaded: LibTorch's files have names in Python.
    in = register_module("first", torch::nn::Linear(5, 7));
    frozen = register_module("frozen", torch::nn::Linear(7, 7));
    out = register_module("out", torch::nn::Linear(7, 3));
    extra = register_module("extra", torch::nn::Linear(7, 3));
    frozen->weight.requires_grad_(false);
    frozen->bias.requires_grad_(false);
  }
  Net() { reset(); }
  at::Tensor forward(const at::Tensor& x, bool with_extra = true) {
    const at::Tensor hidden = at::tanh(frozen(at::tanh(in(x))));
    return with_extra ? out(hidden) + 0.5 * extra(hidden) : out(hidden);
  }
};

/// Passes `x` on. Autograd knows that the result depends on `w`, and gets no gradient for it.
struct Blind : torch::autograd::Function<Blind> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x,
                            const at::Tensor& /*w*/) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0], at::Tensor()};
  }
};
inline at::Tensor blind_to_extra(Net& net, const at::Tensor& y) {
  return Blind::apply(Blind::apply(y, net.extra->weight), net.extra->bias);
}

template <class Module = Net>
std::shared_ptr<Module> make_net(std::size_t seed = 3) {
  torch::manual_seed(seed);
  return std::make_shared<Module>();
}

inline at::Tensor inputs_of(std::size_t step, std::size_t rank, std::int64_t rows = 4) {
  torch::manual_seed(1000 + step * 10 + rank);
  return at::randn({rows, 5});
}
inline at::Tensor loss_of(const at::Tensor& y) { return (y - 0.3).pow(2).mean(); }

inline void require_close(const torch::nn::Module& a, const torch::nn::Module& b,
                          const std::string& when, double tolerance = 1e-6) {
  const auto as = a.named_parameters(), bs = b.named_parameters();
  for (const auto& each : as) {
    const double apart = (each.value() - bs[each.key()]).abs().max().item<double>();
    require(apart <= tolerance, when + ": " + each.key() + " is " + std::to_string(apart) + " off");
  }
}

/// What one process does in a step of W ranks: `backward(net, r)` for each, and the mean. A `clip`
/// of 0 is none.
void step_alone(auto& net, torch::optim::Optimizer& optimizer, std::size_t world, double clip,
                const auto& backward, bool set_to_none = true) {
  for (std::size_t r = 0; r != world; ++r) backward(net, r);
  for (auto& parameter : net.parameters()) {
    if (parameter.grad().defined()) parameter.mutable_grad().div_(static_cast<double>(world));
  }
  if (clip != 0) torch::nn::utils::clip_grad_norm_(net.parameters(), clip);
  optimizer.step();
  optimizer.zero_grad(set_to_none);
}

void all_well(std::size_t world, auto f, ranks::As as = ranks::As::processes) {
  const ranks::Ends ends = ranks::run(as, world, f);
  for (std::size_t r = 0; r < world; ++r)
    BOOST_TEST(ends[r] == "", "rank " << r << " of " << world << ": " << ends[r]);
}
inline void all_say(const ranks::Ends& ends, const std::string& words) {
  for (std::size_t r = 0; r < ends.size(); ++r)
    BOOST_TEST(ends[r].find(words) != std::string::npos, "rank " << r << ": " << ends[r]);
}

}  // namespace torch_net

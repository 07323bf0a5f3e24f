// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file lockstep's cross entropy against LibTorch's in double precision: every type of scores,
/// rows of a warp and of a block, packets and single elements, one block and many.

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "lockstep/torch.cuh"
#include "require.hpp"

namespace torch_gpu {

struct LossAndGradient {
  at::Tensor loss;
  at::Tensor gradient;
};

/// As seen by a program that weighs this loss by three, and goes back from there.
template <class F>
LossAndGradient weighed(const at::Tensor& scores, const F& loss_of) {
  const at::Tensor leaf = scores.detach().requires_grad_();
  const at::Tensor loss = loss_of(leaf);
  (loss * 3).backward();
  return {loss.detach(), leaf.grad()};
}

inline void require_same_cross_entropy(const at::Tensor& scores, const at::Tensor& labels,
                                       double tolerance) {
  const std::string what = std::string(at::toString(scores.scalar_type())) + " scores of " +
                           std::to_string(scores.size(0)) + " x " + std::to_string(scores.size(1));
  const LossAndGradient got = weighed(
      scores, [&](const at::Tensor& x) { return lockstep::torch::cross_entropy(x, labels); });
  const LossAndGradient want = weighed(scores.to(at::kDouble), [&](const at::Tensor& x) {
    return at::cross_entropy_loss(x, labels);
  });
  require(got.loss.scalar_type() == at::kFloat, what + ": the loss is no float");
  require(got.gradient.scalar_type() == scores.scalar_type(), what + ": another type of gradient");
  const double loss = got.loss.item<double>(), right = want.loss.item<double>();
  require(std::abs(loss - right) <= 1e-5 * (1 + std::abs(right)),
          what + ": the loss is " + std::to_string(loss) + ", not " + std::to_string(right));
  const double largest = want.gradient.abs().max().item<double>();
  const double worst = (got.gradient.to(at::kDouble) - want.gradient).abs().max().item<double>();
  require(worst <= tolerance * largest, what + ": a gradient differs by " + std::to_string(worst) +
                                            " of " + std::to_string(largest));
}

inline void require_same_cross_entropy() {
  const auto scores_of = [](std::int64_t rows, std::int64_t classes, at::ScalarType type) {
    return (at::randn({rows, classes}, at::kCUDA) * 4).to(type);
  };
  const auto labels_of = [](std::int64_t rows, std::int64_t classes) {
    return at::randint(classes, {rows}, at::TensorOptions(at::kCUDA).dtype(at::kLong));
  };
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const double tolerance = type == at::kFloat ? 1e-5 : type == at::kHalf ? 1e-3 : 8e-3;
    for (const std::int64_t rows : {1, 64, 129, 600}) {
      for (const std::int64_t classes : {1, 3, 10, 32, 33, 1000, 1024, 1025, 1032, 50304}) {
        at::Tensor labels = labels_of(rows, classes);
        require_same_cross_entropy(scores_of(rows, classes, type), labels, tolerance);
        if (rows == 1) continue;
        labels.narrow(0, 0, rows / 2).fill_(-100);  // rows that do not count
        require_same_cross_entropy(scores_of(rows, classes, type), labels, tolerance);
      }
    }
    // Columns of a wider table, and rows that begin between packets.
    const at::Tensor wide = scores_of(40, 4 * 1032 + 1, type);
    require_same_cross_entropy(wide.narrow(1, 3, 1032), labels_of(40, 1032), tolerance);
    require_same_cross_entropy(wide.view({-1}).narrow(0, 1, 20 * 1032).view({20, 1032}),
                               labels_of(20, 1032), tolerance);
  }
  const at::Tensor scores = scores_of(8, 16, at::kFloat), labels = labels_of(8, 16);
  const auto loss_of = [&](const at::Tensor& x) {
    return lockstep::torch::cross_entropy(x, labels).item<float>();
  };
  at::Tensor bad = scores.clone();
  bad[3][5] = std::numeric_limits<float>::quiet_NaN();
  require(std::isnan(loss_of(bad)), "a score that is NaN is not seen");
  bad[3][5] = std::numeric_limits<float>::infinity();
  require(std::isnan(loss_of(bad)), "an infinite score is not seen");
  bad = scores.clone();
  bad[3].narrow(0, 0, 15).fill_(-std::numeric_limits<float>::infinity());  // as masks do
  require(std::isinf(loss_of(bad)) || std::isfinite(loss_of(bad)), "a masked row's loss is NaN");
  require(
      std::isnan(lockstep::torch::cross_entropy(scores, at::full_like(labels, -100)).item<float>()),
      "the mean of no rows is a number");
  // What the kernels do not take is LibTorch's: its error for labels of another count, its result
  // on CPUs.
  try {
    lockstep::torch::cross_entropy(scores, labels.narrow(0, 0, 7));
    require(false, "a missing label is not an error");
  } catch (const c10::Error&) {
  }
  require(lockstep::torch::cross_entropy(scores.cpu(), labels.cpu()).is_cpu(), "not on the CPU");
  const at::Tensor leaf = scores.detach().requires_grad_();
  std::string words;
  try {
    ::torch::autograd::grad({lockstep::torch::cross_entropy(leaf, labels)}, {leaf}, {}, true, true);
  } catch (const std::exception& error) {
    words = error.what();
  }
  require(words.find("no second derivative") != std::string::npos, "it said: " + words);
}

}  // namespace torch_gpu

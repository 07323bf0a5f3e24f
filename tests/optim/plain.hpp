// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file PyTorch's optimizers for one number, in double, as its documentation writes them.

#include <cmath>
#include <cstddef>

namespace plain {

/// `torch.optim.SGD`: `momentum` 0 keeps no velocity.
struct Sgd {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;

  double velocity = 0;
  std::size_t steps = 0;

  void update(double& parameter, double gradient) {
    ++steps;
    gradient += weight_decay * parameter;
    if (momentum != 0) {
      velocity = steps == 1 ? gradient : momentum * velocity + (1 - dampening) * gradient;
      gradient = nesterov ? gradient + momentum * velocity : velocity;
    }
    parameter -= lr * gradient;
  }
};

/// `torch.optim.Adam`, and `AdamW` where the decay is decoupled.
struct Adam {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled = false;

  double mean = 0;
  double square = 0;
  std::size_t steps = 0;

  void update(double& parameter, double gradient) {
    ++steps;
    if (decoupled) {
      parameter -= lr * weight_decay * parameter;
    } else {
      gradient += weight_decay * parameter;
    }
    mean = beta1 * mean + (1 - beta1) * gradient;
    square = beta2 * square + (1 - beta2) * gradient * gradient;
    const auto n = static_cast<double>(steps);
    const double corrected_mean = mean / (1 - std::pow(beta1, n));
    const double corrected_square = square / (1 - std::pow(beta2, n));
    parameter -= lr * corrected_mean / (std::sqrt(corrected_square) + eps);
  }
};

}  // namespace plain

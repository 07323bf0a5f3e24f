// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A small model, and the numbers that both ways of training it have.

#include <cstddef>

#include "lockstep/ddp.hpp"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/device/device.hpp"

namespace bare {

using namespace lockstep;

struct Batch {
  float x[4][24];
  float y[4][8];
};

/// y = W2 (W1 x + b1) + b2, squared error.
struct Net {
  using Parameters =
      ParameterList<Parameter<"fc1.weight", float, 16, 24>, Parameter<"fc1.bias", float, 16>,
                    Parameter<"fc2.weight", float, 8, 16>, Parameter<"fc2.bias", float, 8>>;
  float h[4][16];
  float d[4][8];

  float forward(auto& step, const Batch& batch) {
    const auto w1 = step.param("fc1.weight"_p);
    const auto b1 = step.param("fc1.bias"_p);
    const auto w2 = step.param("fc2.weight"_p);
    const auto b2 = step.param("fc2.bias"_p);
    float loss = 0;
    for (std::size_t b = 0; b < 4; ++b) {
      for (std::size_t j = 0; j < 16; ++j) {
        h[b][j] = b1(j);
        for (std::size_t i = 0; i < 24; ++i) h[b][j] += w1(j, i) * batch.x[b][i];
      }
      for (std::size_t k = 0; k < 8; ++k) {
        d[b][k] = b2(k) - batch.y[b][k];
        for (std::size_t j = 0; j < 16; ++j) d[b][k] += w2(k, j) * h[b][j];
        loss += d[b][k] * d[b][k] / 8;
        d[b][k] /= 4;
      }
    }
    return loss;
  }

  void backward(auto& step, const Batch& batch) {
    const auto w2 = step.param("fc2.weight"_p);
    const auto g2 = step.grad("fc2.weight"_p);
    const auto c2 = step.grad("fc2.bias"_p);
    for (std::size_t k = 0; k < 8; ++k) {
      c2(k) = d[0][k] + d[1][k] + d[2][k] + d[3][k];
      for (std::size_t j = 0; j < 16; ++j)
        g2(k, j) = d[0][k] * h[0][j] + d[1][k] * h[1][j] + d[2][k] * h[2][j] + d[3][k] * h[3][j];
    }
    step.ready("fc2.bias"_p);
    step.ready("fc2.weight"_p);
    const auto g1 = step.grad("fc1.weight"_p);
    const auto c1 = step.grad("fc1.bias"_p);
    for (std::size_t j = 0; j < 16; ++j) {
      float e[4] = {};
      for (std::size_t b = 0; b < 4; ++b) {
        for (std::size_t k = 0; k < 8; ++k) e[b] += w2(k, j) * d[b][k];
      }
      c1(j) = e[0] + e[1] + e[2] + e[3];
      for (std::size_t i = 0; i < 24; ++i)
        g1(j, i) = e[0] * batch.x[0][i] + e[1] * batch.x[1][i] + e[2] * batch.x[2][i] +
                   e[3] * batch.x[3][i];
    }
    step.ready("fc1.bias"_p);
    step.ready("fc1.weight"_p);
  }
};

inline Batch make_batch() {
  Batch batch;
  for (std::size_t b = 0; b < 4; ++b) {
    for (std::size_t i = 0; i < 24; ++i) batch.x[b][i] = static_cast<float>((b * 7 + i) % 5) - 2;
    for (std::size_t k = 0; k < 8; ++k) batch.y[b][k] = static_cast<float>((b + k) % 3);
  }
  return batch;
}

/// What tests/bare/run counts: `steps` times `step(batch)`.
template <class Step>
[[gnu::noinline]] double counted_steps(std::size_t steps, const Batch& batch, const Step& step) {
  double loss = 0;
  for (std::size_t s = 0; s < steps; ++s) loss = step(batch);
  return loss;
}

}  // namespace bare

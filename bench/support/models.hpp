// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What is stepped: torch.nn.Linear(10, 1) with a mean squared error, and a block of
/// parameters whose gradient is just there, so that only reduction and update take time; and
/// batches.

#include <cstddef>
#include <vector>

#include "lockstep/detail/core/random_stream.hpp"
#include "lockstep/detail/data/batch.hpp"
#include "lockstep/lockstep.hpp"

namespace bench {

using namespace lockstep;

struct Linear {
  using Parameters = ParameterList<Parameter<"weight", float, 1, 10>, Parameter<"bias", float, 1>>;

  float forward(auto& step, const LabelledBatch<float, float>& batch) {
    const auto weight = step.param("weight"_p);
    const auto bias = step.param("bias"_p);
    errors.resize(batch.size());
    float loss = 0;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      float error = bias(0) - batch.labels[i];
      for (std::size_t j = 0; j < 10; ++j) error += weight(0, j) * batch.inputs[10 * i + j];
      errors[i] = error;
      loss += error * error;
    }
    return loss / static_cast<float>(batch.size());
  }

  void backward(auto& step, const LabelledBatch<float, float>& batch) {
    const auto weight = step.grad("weight"_p);
    const auto bias = step.grad("bias"_p);
    float sums[11] = {};
    for (std::size_t i = 0; i < batch.size(); ++i) {
      for (std::size_t j = 0; j < 10; ++j) sums[j] += errors[i] * batch.inputs[10 * i + j];
      sums[10] += errors[i];
    }
    const float scale = 2 / static_cast<float>(batch.size());
    bias(0) = scale * sums[10];
    step.ready("bias"_p);
    for (std::size_t j = 0; j < 10; ++j) weight(0, j) = scale * sums[j];
    step.ready("weight"_p);
  }

  std::vector<float> errors;
};

/// 25 MiB.
struct Block {
  using Parameters = ParameterList<Parameter<"block", float, 6'553'600>>;

  static float forward(auto&, int) { return 0; }
  static void backward(auto& step, int) { step.ready("block"_p); }
};

/// The same batch on every rank and in every run.
template <class X, class Y>
LabelledBatch<X, Y> random_batch(std::size_t rows, std::size_t width, std::size_t classes) {
  RandomStream random(Seed{1});
  LabelledBatch<X, Y> batch;
  batch.resize(rows, width);
  for (X& x : batch.inputs) x = static_cast<X>(random.normal());
  for (Y& y : batch.labels) y = static_cast<Y>(random.below(classes));
  return batch;
}

}  // namespace bench

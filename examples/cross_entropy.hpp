// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A classifier's loss on the host: softmax cross entropy and its gradient.

#include <cmath>
#include <cstddef>
#include <ranges>
#include <stdexcept>

#include "matrix.hpp"

/// A batch's sums.
struct BatchScore {
  double loss = 0;
  std::size_t correct = 0;
};

/// By what the sum of a batch's losses is divided: its number of samples, or the `divisor` that it
/// has. Ranks whose batches differ in size all divide by the mean size; the average over ranks is
/// then the mean over all samples.
double divisor_of(const auto& batch) {
  if constexpr (requires { batch.divisor; }) {
    return static_cast<double>(batch.divisor);
  } else {
    return static_cast<double>(batch.size());
  }
}

/// Softmax cross entropy of every row of outputs, and the gradient of the loss, which may take the
/// outputs' place: (softmax - one at the label) / divisor.
template <class T>
BatchScore cross_entropy(const auto& batch, std::size_t classes, const T* outputs, T* gradients) {
  const T share = static_cast<T>(1 / divisor_of(batch));
  BatchScore total;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const auto label = static_cast<Eigen::Index>(std::ranges::data(batch.labels)[i]);
    if (label < 0 || label >= static_cast<Eigen::Index>(classes)) {
      throw std::out_of_range("labels count from 0 and stay below the number of classes");
    }
    auto row = matrix<1>(gradients + i * classes, 1, classes);
    if (gradients != outputs) row = matrix<1>(outputs + i * classes, 1, classes);
    Eigen::Index best = 0;
    row.array() -= row.maxCoeff(&best);  // now no exponential overflows
    total.correct += best == label;
    const T own = row(label);
    row = row.array().exp();
    const T sum = row.sum();
    total.loss += std::log(sum) - own;
    row *= share / sum;
    row(label) -= share;
  }
  return total;
}

/// The loss of a batch, which backward starts from.
template <class T>
T mean_cross_entropy(const auto& batch, std::size_t classes, const T* outputs, T* gradients) {
  return static_cast<T>(cross_entropy(batch, classes, outputs, gradients).loss / divisor_of(batch));
}

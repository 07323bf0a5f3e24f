// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The examples' main model: three linear layers with ReLU between, softmax cross entropy.

#include <cstddef>
#include <ranges>
#include <vector>

#include "cross_entropy.hpp"
#include "lockstep/lockstep.hpp"
#include "matrix.hpp"

using namespace lockstep;  // as every example has it

/// `Mlp<float, 784, 256, 10>` sorts rows of 784 numbers into 10 classes. A batch has `size()` rows:
/// `inputs`, contiguous and row-major, and `labels`, one integer below Classes for each row.
///
/// Eigen multiplies, on the calling thread alone: a rank is a core. Activations and their gradients
/// lie in buffers that grow to the largest batch and are kept from step to step.
template <class T, std::size_t Inputs, std::size_t Hidden, std::size_t Classes>
struct Mlp {
  using Parameters =
      ParameterList<Parameter<"fc1.weight", T, Hidden, Inputs>, Parameter<"fc1.bias", T, Hidden>,
                    Parameter<"fc2.weight", T, Hidden, Hidden>, Parameter<"fc2.bias", T, Hidden>,
                    Parameter<"fc3.weight", T, Classes, Hidden>, Parameter<"fc3.bias", T, Classes>>;

  /// The mean loss of the batch.
  T forward(auto& step, const auto& batch) {
    run(step, batch, resized(outputs_, batch.size(), Classes));
    return mean_loss(batch, outputs_.data(), outputs_.data());
  }

  /// Overwrites all gradients, for the batch that `forward` has just seen.
  void backward(auto& step, const auto& batch) { backward_from(step, batch, outputs_.data()); }

  // The same in two parts, for `ParallelStrategy<DP>` with `LossOnOutput`: replicas predict, one
  // loss is taken over all outputs, and replicas run backward from its gradient.

  using Output = OutputOf<T, Classes>;

  void predict(auto& step, const auto& batch, auto outputs) { run(step, batch, matrix(outputs)); }
  T loss(auto&, const auto& batch, auto outputs, auto gradients) {
    return mean_loss(batch, outputs.data_handle(), gradients.data_handle());
  }
  void backward(auto& step, const auto& batch, auto gradients) {
    backward_from(step, batch, gradients.data_handle());
  }

  /// Adds the batch's losses and right answers to a tally: `add(name, sum, count)`.
  void evaluate(auto& step, const auto& batch, auto& tally) {
    run(step, batch, resized(outputs_, batch.size(), Classes));
    const BatchScore total = cross_entropy(batch, Classes, outputs_.data(), outputs_.data());
    tally.add("loss", total.loss, batch.size());
    tally.add("accuracy", static_cast<double>(total.correct), batch.size());
  }

 private:
  /// From the gradient of the loss by the outputs.
  void backward_from(auto& step, const auto& batch, const T* gradients) {
    const auto inputs = rows_of(batch);
    const auto hidden1 = matrix(hidden1_.data(), batch.size(), Hidden);
    const auto hidden2 = matrix(hidden2_.data(), batch.size(), Hidden);
    const auto errors3 = matrix(gradients, batch.size(), Classes);

    matrix(step.grad("fc3.bias"_p)) = errors3.colwise().sum();
    step.ready("fc3.bias"_p);
    matrix(step.grad("fc3.weight"_p)).noalias() = errors3.transpose() * hidden2;
    step.ready("fc3.weight"_p);

    auto errors2 = resized(errors2_, batch.size(), Hidden);
    errors2.noalias() = errors3 * matrix(step.param("fc3.weight"_p));
    gate(errors2, hidden2, matrix(step.grad("fc2.bias"_p)));
    step.ready("fc2.bias"_p);
    matrix(step.grad("fc2.weight"_p)).noalias() = errors2.transpose() * hidden1;
    step.ready("fc2.weight"_p);

    auto errors1 = resized(errors1_, batch.size(), Hidden);
    errors1.noalias() = errors2 * matrix(step.param("fc2.weight"_p));
    gate(errors1, hidden1, matrix(step.grad("fc1.bias"_p)));
    step.ready("fc1.bias"_p);
    matrix(step.grad("fc1.weight"_p)).noalias() = errors1.transpose() * inputs;
    step.ready("fc1.weight"_p);  // the gradient of the inputs is not needed
  }

  static auto rows_of(const auto& batch) {
    return matrix(std::ranges::data(batch.inputs), batch.size(), Inputs);
  }

  /// NaN stays NaN, so that a run that has diverged shows it.
  static void relu(auto& outputs) {
    outputs = outputs.unaryExpr([](T x) { return x < T{0} ? T{0} : x; });
  }

  /// Back through ReLU, and the bias's gradient, in one pass: errors go on where the unit was
  /// active, and are added up over the batch.
  static void gate(auto& errors, const auto& outputs, auto bias) {
    bias.setZero();
    for (Eigen::Index i = 0; i < errors.rows(); ++i) {
      for (Eigen::Index j = 0; j < static_cast<Eigen::Index>(Hidden); ++j) {
        errors(i, j) = outputs(i, j) <= T{0} ? T{0} : errors(i, j);
        bias(j) += errors(i, j);
      }
    }
  }

  /// Up to the last layer's outputs.
  void run(auto& step, const auto& batch, auto outputs) {
    auto hidden1 = resized(hidden1_, batch.size(), Hidden);
    linear(hidden1, rows_of(batch), matrix(step.param("fc1.weight"_p)),
           matrix(step.param("fc1.bias"_p)));
    relu(hidden1);
    auto hidden2 = resized(hidden2_, batch.size(), Hidden);
    linear(hidden2, hidden1, matrix(step.param("fc2.weight"_p)), matrix(step.param("fc2.bias"_p)));
    relu(hidden2);
    linear(outputs, hidden2, matrix(step.param("fc3.weight"_p)), matrix(step.param("fc3.bias"_p)));
  }

  static T mean_loss(const auto& batch, const T* outputs, T* gradients) {
    return mean_cross_entropy(batch, Classes, outputs, gradients);
  }

  std::vector<T> hidden1_, hidden2_;  // after ReLU
  std::vector<T> outputs_;            // after `score`, their gradient
  std::vector<T> errors1_, errors2_;  // gradients of the hidden layers' outputs
};

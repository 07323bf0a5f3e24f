// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The examples' convolutional network: convolution 3 x 3, batch norm, ReLU and max pooling,
/// twice, and a linear layer.

#include <array>
#include <cstddef>
#include <ranges>
#include <vector>

#include "conv2d.hpp"
#include "cross_entropy.hpp"
#include "lockstep/lockstep.hpp"
#include "matrix.hpp"
#include "max_pool.hpp"

using namespace lockstep;  // as every example has it

/// `ConvNet<float, 1, 28, 32, 64, 10>` sorts images of one channel and 28 x 28 pixels into 10
/// classes, with 32 and 64 channels in between. A batch has `size()` images: `inputs`, contiguous,
/// and `labels`, one integer below Classes for each. Numbers that are `dynamic` are the
/// constructor's.
///
/// The model knows nothing of ranks: `Norms<...>` of a job says of whose samples batch norms take
/// their statistics. Activations lie in buffers that grow to the largest batch and are kept from
/// step to step; in backward, gradients take the place of those that are no longer needed.
template <class T, std::size_t Channels, std::size_t Side, std::size_t First, std::size_t Second,
          std::size_t Classes>
struct ConvNet {
  using Norm1 = BatchNorm<"bn1", First, T>;
  using Norm2 = BatchNorm<"bn2", Second, T>;

  static constexpr std::size_t half(std::size_t side) {
    return side == dynamic ? dynamic : side / 2;
  }
  static constexpr std::size_t quarter = half(half(Side));
  static constexpr std::size_t features =
      Second == dynamic || Side == dynamic ? dynamic : Second * quarter * quarter;

  using Parameters = ParameterList<
      Parameter<"conv1.weight", T, First, Channels, 3, 3>, Parameter<"conv1.bias", T, First>, Norm1,
      Parameter<"conv2.weight", T, Second, First, 3, 3>, Parameter<"conv2.bias", T, Second>, Norm2,
      Parameter<"fc.weight", T, Classes, features>, Parameter<"fc.bias", T, Classes>>;
  using Buffers = BufferList<Norm1, Norm2>;

  struct Sizes {
    std::size_t channels = Channels, side = Side, first = First, second = Second, classes = Classes;
  };

  ConvNet() = default;
  explicit ConvNet(const Sizes& given) : sizes(given) {}

  void shapes(auto& shape) const {
    shape("conv1.weight"_p, sizes.first, sizes.channels, 3, 3);
    shape("conv1.bias"_p, sizes.first);
    Norm1::shapes(shape, sizes.first);
    shape("conv2.weight"_p, sizes.second, sizes.first, 3, 3);
    shape("conv2.bias"_p, sizes.second);
    Norm2::shapes(shape, sizes.second);
    shape("fc.weight"_p, sizes.classes,
          sizes.second * half(half(sizes.side)) * half(half(sizes.side)));
    shape("fc.bias"_p, sizes.classes);
  }

  /// The mean loss of the batch.
  T forward(auto& step, const auto& batch) {
    run(step, batch, resized(outputs_, batch.size(), sizes.classes));
    return mean_cross_entropy(batch, sizes.classes, outputs_.data(), outputs_.data());
  }

  /// Overwrites all gradients, for the batch that `forward` has just seen.
  void backward(auto& step, const auto& batch) {
    const std::size_t n = batch.size();
    const auto errors = matrix(outputs_.data(), n, sizes.classes);
    const auto rows = matrix(pooled2(n));
    matrix(step.grad("fc.bias"_p)) = errors.colwise().sum();
    step.ready("fc.bias"_p);
    matrix(step.grad("fc.weight"_p)).noalias() = errors.transpose() * rows;
    step.ready("fc.weight"_p);

    matrix(pooled2(n)).noalias() = errors * matrix(step.param("fc.weight"_p));
    max_pool::backward(active2(n), pooled2(n));
    norm2.backward_relu(step, convolved2(n), active2(n), active2(n));  // marks its parameters ready
    conv2.parameter_gradients(pooled1(n), active2(n), step.grad("conv2.weight"_p),
                              step.grad("conv2.bias"_p));
    step.ready("conv2.bias"_p);
    step.ready("conv2.weight"_p);

    conv2.input_gradient(active2(n), step.param("conv2.weight"_p), pooled1(n));
    max_pool::backward(active1(n), pooled1(n));
    norm1.backward_relu(step, convolved1(n), active1(n), active1(n));
    conv1.parameter_gradients(images(batch), active1(n), step.grad("conv1.weight"_p),
                              step.grad("conv1.bias"_p));
    step.ready("conv1.bias"_p);
    step.ready("conv1.weight"_p);  // the gradient of the images is not needed
  }

  /// Adds the batch's losses and right answers to a tally: `add(name, sum, count)`.
  void evaluate(auto& step, const auto& batch, auto& tally) {
    run(step, batch, resized(outputs_, batch.size(), sizes.classes));
    const BatchScore total = cross_entropy(batch, sizes.classes, outputs_.data(), outputs_.data());
    tally.add("loss", total.loss, batch.size());
    tally.add("accuracy", static_cast<double>(total.correct), batch.size());
  }

  using Output = OutputOf<T, Classes>;
  std::array<std::size_t, 1> output_extents() const { return {sizes.classes}; }
  void predict(auto& step, const auto& batch, auto outputs) { run(step, batch, matrix(outputs)); }

  Sizes sizes;
  Conv2d<T> conv1, conv2;
  Norm1 norm1;
  Norm2 norm2;

 private:
  /// Up to the last layer's outputs.
  void run(auto& step, const auto& batch, auto outputs) {
    const std::size_t n = batch.size();
    conv1.forward(images(batch), step.param("conv1.weight"_p), step.param("conv1.bias"_p),
                  convolved1(n));
    norm1.forward_relu(step, convolved1(n), active1(n));
    max_pool::forward(active1(n), pooled1(n));
    conv2.forward(pooled1(n), step.param("conv2.weight"_p), step.param("conv2.bias"_p),
                  convolved2(n));
    norm2.forward_relu(step, convolved2(n), active2(n));
    max_pool::forward(active2(n), pooled2(n));
    linear(outputs, matrix(pooled2(n)), matrix(step.param("fc.weight"_p)),
           matrix(step.param("fc.bias"_p)));
  }

  auto images(const auto& batch) const {
    return HostView<const T, dynamic, Channels, Side, Side>(
        std::ranges::data(batch.inputs), batch.size(), sizes.channels, sizes.side, sizes.side);
  }

  /// n images of one layer.
  template <std::size_t C, std::size_t S>
  static auto layer(std::vector<T>& buffer, std::size_t n, std::size_t channels, std::size_t side) {
    buffer.resize(n * channels * side * side);  // never gives memory back
    return HostView<T, dynamic, C, S, S>(buffer.data(), n, channels, side, side);
  }
  auto convolved1(std::size_t n) {
    return layer<First, Side>(convolved1_, n, sizes.first, sizes.side);
  }
  auto active1(std::size_t n) { return layer<First, Side>(active1_, n, sizes.first, sizes.side); }
  auto pooled1(std::size_t n) {
    return layer<First, half(Side)>(pooled1_, n, sizes.first, half(sizes.side));
  }
  auto convolved2(std::size_t n) {
    return layer<Second, half(Side)>(convolved2_, n, sizes.second, half(sizes.side));
  }
  auto active2(std::size_t n) {
    return layer<Second, half(Side)>(active2_, n, sizes.second, half(sizes.side));
  }
  auto pooled2(std::size_t n) {
    return layer<Second, quarter>(pooled2_, n, sizes.second, half(half(sizes.side)));
  }

  std::vector<T> convolved1_, convolved2_;
  std::vector<T> active1_, active2_;  // after batch norm and ReLU; then gradients of convolutions
  std::vector<T> pooled1_, pooled2_;  // then their gradients
  std::vector<T> outputs_;            // then their gradients
};

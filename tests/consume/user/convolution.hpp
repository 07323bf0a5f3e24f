// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A small convolutional network in plain loops, and images for it.

#include <lockstep/lockstep.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

using Images = lockstep::LabelledBatch<double, std::int32_t>;

/// 3x3 convolution without padding, ReLU, mean over the image, linear, softmax cross entropy. The
/// mean makes it blind for places: only the convolution can tell one class from another.
struct ConvNet {
  static constexpr std::size_t side = 10, kernel = 3, channels = 6, classes = 4;
  static constexpr std::size_t inner = side - kernel + 1;
  static constexpr std::size_t pixels = inner * inner;

  using Parameters =
      lockstep::ParameterList<lockstep::Parameter<"conv.weight", double, channels, kernel, kernel>,
                              lockstep::Parameter<"conv.bias", double, channels>,
                              lockstep::Parameter<"fc.weight", double, classes, channels>,
                              lockstep::Parameter<"fc.bias", double, classes>>;

  double forward(auto& step, const Images& batch) {
    return run(step, batch).loss / static_cast<double>(batch.size());
  }

  void backward(auto& step, const Images& batch) {
    using namespace lockstep;
    const auto rows = static_cast<double>(batch.size());
    const auto fc_weight = step.grad("fc.weight"_p);
    const auto fc_bias = step.grad("fc.bias"_p);
    for (std::size_t k = 0; k < classes; ++k) {
      fc_bias(k) = 0;
      for (std::size_t c = 0; c < channels; ++c) fc_weight(k, c) = 0;
    }
    for (std::size_t i = 0; i < batch.size(); ++i) {
      for (std::size_t k = 0; k < classes; ++k) {
        const double error = error_of(batch, i, k) / rows;
        fc_bias(k) += error;
        for (std::size_t c = 0; c < channels; ++c)
          fc_weight(k, c) += error * mean_[i * channels + c];
      }
    }
    step.ready("fc.bias"_p);
    step.ready("fc.weight"_p);

    const auto weight = step.grad("conv.weight"_p);
    const auto bias = step.grad("conv.bias"_p);
    const auto fc = step.param("fc.weight"_p);
    for (std::size_t c = 0; c < channels; ++c) {
      bias(c) = 0;
      for (std::size_t u = 0; u < kernel; ++u)
        for (std::size_t v = 0; v < kernel; ++v) weight(c, u, v) = 0;
      for (std::size_t i = 0; i < batch.size(); ++i) {
        double error = 0;  // of every pixel of the channel alike: the mean divides evenly
        for (std::size_t k = 0; k < classes; ++k) error += fc(k, c) * error_of(batch, i, k);
        error /= rows * static_cast<double>(pixels);
        for (std::size_t y = 0; y < inner; ++y) {
          for (std::size_t x = 0; x < inner; ++x) {
            if (hidden_[((i * channels + c) * inner + y) * inner + x] <= 0) continue;
            bias(c) += error;
            for (std::size_t u = 0; u < kernel; ++u)
              for (std::size_t v = 0; v < kernel; ++v)
                weight(c, u, v) += error * batch.row(i)[(y + u) * side + x + v];
          }
        }
      }
    }
    step.ready("conv.bias"_p);
    step.ready("conv.weight"_p);
  }

  void evaluate(auto& step, const Images& batch, auto& tally) {
    const Sums sums = run(step, batch);
    tally.add("loss", sums.loss, batch.size());
    tally.add("accuracy", sums.correct, batch.size());
  }

 private:
  struct Sums {
    double loss = 0;
    double correct = 0;
  };

  double error_of(const Images& batch, std::size_t i, std::size_t k) const {
    const bool right = static_cast<std::size_t>(batch.labels[i]) == k;
    return softmax_[i * classes + k] - (right ? 1 : 0);
  }

  Sums run(auto& step, const Images& batch) {
    using namespace lockstep;
    const auto weight = step.param("conv.weight"_p);
    const auto bias = step.param("conv.bias"_p);
    const auto fc = step.param("fc.weight"_p);
    const auto fc_bias = step.param("fc.bias"_p);
    hidden_.resize(batch.size() * channels * pixels);
    mean_.assign(batch.size() * channels, 0);
    softmax_.resize(batch.size() * classes);
    Sums sums;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      for (std::size_t c = 0; c < channels; ++c) {
        for (std::size_t y = 0; y < inner; ++y) {
          for (std::size_t x = 0; x < inner; ++x) {
            double sum = bias(c);
            for (std::size_t u = 0; u < kernel; ++u)
              for (std::size_t v = 0; v < kernel; ++v)
                sum += weight(c, u, v) * batch.row(i)[(y + u) * side + x + v];
            sum = sum > 0 ? sum : 0;
            hidden_[((i * channels + c) * inner + y) * inner + x] = sum;
            mean_[i * channels + c] += sum / static_cast<double>(pixels);
          }
        }
      }
      double* const row = softmax_.data() + i * classes;
      std::size_t best = 0;
      for (std::size_t k = 0; k < classes; ++k) {
        row[k] = fc_bias(k);
        for (std::size_t c = 0; c < channels; ++c) row[k] += fc(k, c) * mean_[i * channels + c];
        if (row[k] > row[best]) best = k;
      }
      const auto label = static_cast<std::size_t>(batch.labels[i]);
      const double top = row[best];
      double all = 0;
      for (std::size_t k = 0; k < classes; ++k) all += std::exp(row[k] - top);
      sums.loss += std::log(all) + top - row[label];
      sums.correct += best == label;
      for (std::size_t k = 0; k < classes; ++k) row[k] = std::exp(row[k] - top) / all;
    }
    return sums;
  }

  std::vector<double> hidden_;   // after ReLU
  std::vector<double> mean_;     // of every channel
  std::vector<double> softmax_;  // of every class
};

/// Lines anywhere in an image, under noise: horizontal, vertical, and the two diagonals.
inline lockstep::InMemoryDataset<double, std::int32_t> make_images(std::size_t count,
                                                                   std::uint64_t seed) {
  constexpr std::size_t side = ConvNet::side, length = 5;
  lockstep::RandomStream random(lockstep::Seed{seed});
  std::vector<double> pixels(count * side * side);
  std::vector<std::int32_t> labels(count);
  for (double& pixel : pixels) pixel = 0.1 * random.normal();
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t kind = random.below(ConvNet::classes);
    labels[i] = static_cast<std::int32_t>(kind);
    const std::size_t down = kind == 0 ? 0 : 1;
    const std::size_t right = kind == 1 ? 0 : 1;
    const std::size_t y = random.below(down ? side - length + 1 : side);
    const std::size_t x = random.below(right ? side - length + 1 : side);
    for (std::size_t n = 0; n < length; ++n) {
      const std::size_t column = x + right * (kind == 3 ? length - 1 - n : n);
      pixels[(i * side + y + down * n) * side + column] += 1;
    }
  }
  return {std::move(pixels), std::move(labels)};
}

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A convolution on the host as products of matrices.

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <vector>

#include "matrix.hpp"

/// `nn.Conv2d(in, out, 3, padding=1)`, or with any other odd kernel and the padding that keeps the
/// size of images: stride 1. Images are views of (samples, channels, height, width), a weight is
/// one of (out, in, kernel height, kernel width).
///
/// A sample is unrolled (im2col): for every input channel and every place of the kernel there is a
/// row with the pixels that this place meets, one for each pixel of the output. Then outputs =
/// weight x rows, and both gradients are products as well. One sample at a time stays in the cache.
template <class T>
class Conv2d {
 public:
  void forward(auto inputs, auto weight, auto bias, auto outputs) {
    const Unrolled rows(inputs, weight);
    const auto kernels = matrix(weight);
    const auto biases = matrix(bias).transpose();
    auto unrolled = resized(unrolled_, rows.count(), rows.pixels);
    for (std::size_t n = 0; n < inputs.extent(0); ++n) {
      auto output = sample(outputs, n);
      rows.from(sample(inputs, n).data(), unrolled.data());
      output.colwise() = biases;
      output.noalias() += kernels * unrolled;
    }
  }

  /// Overwrites the gradients of weight and bias; `errors` are the outputs' gradients.
  void parameter_gradients(auto inputs, auto errors, auto weight_gradient, auto bias_gradient) {
    const Unrolled rows(inputs, weight_gradient);
    auto kernels = matrix(weight_gradient);
    auto biases = matrix(bias_gradient);
    auto unrolled = resized(unrolled_, rows.count(), rows.pixels);
    kernels.setZero();
    biases.setZero();
    for (std::size_t n = 0; n < inputs.extent(0); ++n) {
      const auto error = sample(errors, n);
      rows.from(sample(inputs, n).data(), unrolled.data());
      kernels.noalias() += error * unrolled.transpose();
      biases += error.rowwise().sum().transpose();
    }
  }

  /// Overwrites the inputs' gradients.
  void input_gradient(auto errors, auto weight, auto gradients) {
    const Unrolled rows(gradients, weight);
    const auto kernels = matrix(weight);
    auto unrolled = resized(unrolled_, rows.count(), rows.pixels);
    for (std::size_t n = 0; n < gradients.extent(0); ++n) {
      auto gradient = sample(gradients, n);
      unrolled.noalias() = kernels.transpose() * sample(errors, n);
      gradient.setZero();
      rows.add_to(unrolled.data(), gradient.data());
    }
  }

 private:
  /// One sample as a matrix with a row for each channel.
  static auto sample(auto images, std::size_t n) {
    const std::size_t pixels = images.extent(2) * images.extent(3);
    return matrix(images.data_handle() + n * images.extent(1) * pixels, images.extent(1), pixels);
  }

  /// Where the rows of an unrolled sample come from. A place (i, j) from the kernel's middle meets
  /// the image moved by i rows and j columns. In memory that is the image moved by i * width + j
  /// pixels, so a row is one copy; pixels that came from the end of another row are zeros.
  struct Unrolled {
    std::ptrdiff_t channels, height, width, tall, wide;  // the latter two are the kernel's
    std::size_t pixels;

    Unrolled(auto images, auto weight)
        : channels(size(images, 1)),
          height(size(images, 2)),
          width(size(images, 3)),
          tall(size(weight, 2)),
          wide(size(weight, 3)),
          pixels(images.extent(2) * images.extent(3)) {
      if (tall % 2 == 0 || wide % 2 == 0) throw std::invalid_argument("a kernel has odd sides");
    }

    static std::ptrdiff_t size(auto view, std::size_t axis) {
      return static_cast<std::ptrdiff_t>(view.extent(axis));
    }
    std::size_t count() const { return static_cast<std::size_t>(channels * tall * wide); }

    void from(const T* image, T* rows) const {
      each([&](std::ptrdiff_t channel, std::ptrdiff_t row, std::ptrdiff_t i, std::ptrdiff_t j) {
        const std::ptrdiff_t all = height * width;
        const auto [first, last] = inside(i * width + j);
        const T* const plane = image + channel * all;
        T* const to = rows + row * all;
        std::fill(to, to + first, T{0});
        std::copy(plane + first + i * width + j, plane + last + i * width + j, to + first);
        std::fill(to + last, to + all, T{0});
        clear_sides(to, j);
      });
    }

    /// Adds every row to the pixels that it comes from. Changes the rows.
    void add_to(T* rows, T* image) const {
      each([&](std::ptrdiff_t channel, std::ptrdiff_t row, std::ptrdiff_t i, std::ptrdiff_t j) {
        const std::ptrdiff_t all = height * width;
        const auto [first, last] = inside(i * width + j);
        const auto length = static_cast<std::size_t>(last - first);
        T* const plane = image + channel * all + i * width + j;
        T* const from = rows + row * all;
        clear_sides(from, j);
        matrix<1>(plane + first, 1, length) += matrix<1>(from + first, 1, length);
      });
    }

   private:
    /// Calls `f(channel, row, i, j)` for every row.
    void each(const auto& f) const {
      for (std::ptrdiff_t channel = 0, row = 0; channel < channels; ++channel) {
        for (std::ptrdiff_t i = -(tall / 2); i <= tall / 2; ++i) {
          for (std::ptrdiff_t j = -(wide / 2); j <= wide / 2; ++j) f(channel, row++, i, j);
        }
      }
    }

    struct Range {
      std::ptrdiff_t first, last;
    };
    /// The pixels of a row that a move by `shift` finds inside of the image.
    Range inside(std::ptrdiff_t shift) const {
      const std::ptrdiff_t all = height * width;
      const std::ptrdiff_t first = std::clamp<std::ptrdiff_t>(-shift, 0, all);
      return {first, std::clamp<std::ptrdiff_t>(all - shift, first, all)};
    }

    /// Zeroes what a move by j columns has brought from another row.
    void clear_sides(T* plane, std::ptrdiff_t j) const {
      const std::ptrdiff_t first = j < 0 ? 0 : std::max<std::ptrdiff_t>(width - j, 0);
      const std::ptrdiff_t last = j < 0 ? std::min(-j, width) : width;
      for (std::ptrdiff_t row = 0; row < height; ++row)
        for (std::ptrdiff_t column = first; column < last; ++column)
          plane[row * width + column] = T{0};
    }
  };

  std::vector<T> unrolled_;
};

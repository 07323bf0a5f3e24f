// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Max pooling on the host: the largest of every 2 x 2 pixels.

#include <algorithm>
#include <cstddef>

/// Images are views of (samples, channels, height, width); outputs have half the height and width.
/// As in PyTorch, the last row or column of an odd number of them is left out.
namespace max_pool {

/// The larger of two numbers; NaN stays NaN, so that a run that has diverged shows it.
template <class T>
T larger(T a, T b) {
  return b > a || b != b ? b : a;
}

/// Calls `f(upper, lower, output, n)` for every row of n outputs, with the rows of inputs that it
/// is found from. `outputs` are the outputs, or their gradients.
void for_each_row(auto inputs, auto outputs, const auto& f) {
  const std::size_t height = inputs.extent(2), width = inputs.extent(3);
  const std::size_t planes = inputs.extent(0) * inputs.extent(1);
  auto* output = outputs.data_handle();
  for (std::size_t plane = 0; plane < planes; ++plane) {
    for (std::size_t i = 0; i < height / 2; ++i, output += width / 2) {
      auto* const upper = inputs.data_handle() + (plane * height + 2 * i) * width;
      f(upper, upper + width, output, width / 2);
    }
  }
}

template <class Images>
void forward(Images inputs, auto outputs) {
  using T = typename Images::value_type;
  for_each_row(inputs, outputs, [](const T* upper, const T* lower, T* output, std::size_t n) {
    for (std::size_t j = 0; j < n; ++j) {
      output[j] =
          larger(larger(upper[2 * j], upper[2 * j + 1]), larger(lower[2 * j], lower[2 * j + 1]));
    }
  });
}

/// Puts the inputs' gradients in their place: the gradient of an output where its largest input
/// was, the first of several, and zeros elsewhere.
template <class Images>
void backward(Images inputs, auto errors) {
  using T = typename Images::value_type;
  for_each_row(inputs, errors, [](T* upper, T* lower, const T* error, std::size_t n) {
    for (std::size_t j = 0; j < n; ++j) {
      const T a = upper[2 * j], b = upper[2 * j + 1], c = lower[2 * j], d = lower[2 * j + 1];
      const T most = larger(larger(a, b), larger(c, d));
      const T after_a = a == most ? T{0} : error[j];
      const T after_b = b == most ? T{0} : after_a;
      upper[2 * j] = a == most ? error[j] : T{0};
      upper[2 * j + 1] = b == most ? after_a : T{0};
      lower[2 * j] = c == most ? after_b : T{0};
      lower[2 * j + 1] = c == most ? T{0} : after_b;
    }
  });
  const std::size_t height = inputs.extent(2), width = inputs.extent(3);
  if (height % 2 == 0 && width % 2 == 0) return;
  for (std::size_t plane = 0; plane < inputs.extent(0) * inputs.extent(1); ++plane) {
    T* const pixels = inputs.data_handle() + plane * height * width;
    if (height % 2 != 0) std::fill_n(pixels + (height - 1) * width, width, T{0});
    for (std::size_t i = 0; width % 2 != 0 && i < height; ++i) pixels[(i + 1) * width - 1] = T{0};
  }
}

}  // namespace max_pool

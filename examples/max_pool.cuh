// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The largest of every two by two pixels, and back, on a GPU.

#include <cstddef>

#include "lockstep/lockstep.cuh"

/// Images are (N, C, H, W), taken as N * C planes of one side. The last row and column of an odd
/// side are in no window, as in PyTorch. Which of equal values a gradient goes to is the first, in
/// the order of memory; that is found out again in backward, so nothing is kept.
namespace max_pool {

/// A thread for each window.
template <class T>
LOCKSTEP_KERNEL forward_kernel(const T* inputs, T* outputs, std::size_t count, unsigned side,
                               unsigned half) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const std::size_t line = i / half;  // of all planes' outputs
  const std::size_t plane = line / half;
  const T* const at =
      inputs + (plane * side + 2 * (line - plane * half)) * side + 2 * (i - line * half);
  T largest = at[0];
  if (at[1] > largest) largest = at[1];
  if (at[side] > largest) largest = at[side];
  if (at[side + 1] > largest) largest = at[side + 1];
  outputs[i] = largest;
}

/// A thread for each window, and for what an odd side leaves over: `cells` is half the side,
/// rounded up. It reads its inputs and puts their gradients in their place.
template <class T>
LOCKSTEP_KERNEL backward_kernel(T* inputs, const T* errors, std::size_t count, unsigned side,
                                unsigned half, unsigned cells) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const std::size_t line = i / cells;
  const std::size_t plane = line / cells;
  const auto y = static_cast<unsigned>(line - plane * cells);
  const auto x = static_cast<unsigned>(i - line * cells);
  T* const at = inputs + (plane * side + 2 * y) * side + 2 * x;
  if (y >= half || x >= half) {
    const unsigned rows = y >= half ? 1 : 2;
    const unsigned columns = x >= half ? 1 : 2;
    for (unsigned r = 0; r < rows; ++r)
      for (unsigned c = 0; c < columns; ++c) at[r * side + c] = T{};
    return;
  }
  const T values[] = {at[0], at[1], at[side], at[side + 1]};
  int largest = 0;
  for (int k = 1; k < 4; ++k)
    if (values[k] > values[largest]) largest = k;
  const T error = errors[(plane * half + y) * half + x];
  for (int k = 0; k < 4; ++k) at[(k / 2) * side + k % 2] = k == largest ? error : T{};
}

inline constexpr unsigned threads = 256;

inline unsigned blocks(std::size_t count) {
  return static_cast<unsigned>((count + threads - 1) / threads);
}

/// outputs = the windows' largest values. An empty batch needs no kernel.
template <class T>
void forward(cudaStream_t stream, const T* inputs, T* outputs, std::size_t planes,
             std::size_t side) {
  const std::size_t half = side / 2;
  const std::size_t count = planes * half * half;
  if (count == 0) return;
  forward_kernel<<<blocks(count), threads, 0, stream>>>(
      inputs, outputs, count, static_cast<unsigned>(side), static_cast<unsigned>(half));
  lockstep::check_launch("max_pool::forward");
}

/// inputs = their gradients, from `errors`, those of the outputs.
template <class T>
void backward(cudaStream_t stream, T* inputs, const T* errors, std::size_t planes,
              std::size_t side) {
  const std::size_t cells = (side + 1) / 2;
  const std::size_t count = planes * cells * cells;
  if (count == 0) return;
  backward_kernel<<<blocks(count), threads, 0, stream>>>(
      inputs, errors, count, static_cast<unsigned>(side), static_cast<unsigned>(side / 2),
      static_cast<unsigned>(cells));
  lockstep::check_launch("max_pool::backward");
}

}  // namespace max_pool

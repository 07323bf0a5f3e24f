// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The parts of a layer that are no products: conversion, ReLU's gradient, the bias's
/// gradient.

#include <cstddef>

#include "lockstep/lockstep.cuh"

namespace elementwise {

template <class To>
LOCKSTEP_KERNEL convert_kernel(const float* from, To* to, std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) to[i] = static_cast<To>(from[i]);
}

template <class T>
LOCKSTEP_KERNEL gate_kernel(const T* outputs, T* errors, std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count && static_cast<float>(outputs[i]) <= 0) errors[i] = static_cast<T>(0.f);
}

inline constexpr int row_groups = 8;

/// A lane for each of the block's 32 columns, a warp for each group of rows.
template <class T>
LOCKSTEP_KERNEL __launch_bounds__(32 * row_groups)
    column_sums_kernel(const T* values, int rows, int columns, T* sums) {
  const int x = static_cast<int>(threadIdx.x);
  const int y = static_cast<int>(threadIdx.y);
  const int column = static_cast<int>(blockIdx.x) * 32 + x;
  __shared__ float parts[row_groups][32];
  float sum = 0;
  for (int row = y; row < rows && column < columns; row += row_groups) {
    sum += static_cast<float>(values[static_cast<std::size_t>(row) * columns + column]);
  }
  parts[y][x] = sum;
  __syncthreads();
  if (y != 0 || column >= columns) return;
  for (int group = 1; group < row_groups; ++group) sum += parts[group][x];
  sums[column] = static_cast<T>(sum);
}

inline unsigned blocks(std::size_t count, std::size_t each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

/// to[i] = from[i], rounded to another type.
template <class To>
void convert(cudaStream_t stream, const float* from, To* to, std::size_t count) {
  convert_kernel<<<blocks(count, 256), 256, 0, stream>>>(from, to, count);
  lockstep::check_launch("elementwise::convert");
}

/// errors[i] = 0 where the unit was not active.
template <class T>
void gate(cudaStream_t stream, const T* outputs, T* errors, std::size_t count) {
  gate_kernel<<<blocks(count, 256), 256, 0, stream>>>(outputs, errors, count);
  lockstep::check_launch("elementwise::gate");
}

/// sums[column] = the sum of a column, in an order that never changes.
template <class T>
void column_sums(cudaStream_t stream, const T* values, std::size_t rows, std::size_t columns,
                 T* sums) {
  column_sums_kernel<<<blocks(columns, 32), dim3(32, row_groups), 0, stream>>>(
      values, static_cast<int>(rows), static_cast<int>(columns), sums);
  lockstep::check_launch("elementwise::column_sums");
}

}  // namespace elementwise

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The kernels of PowerSGD: products of a bucket's matrices with thin ones, all matrices of a
/// bucket in one launch, and the same bits every time.

#include <cuda_runtime.h>

#include <cstddef>
#include <cub/block/block_reduce.cuh>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/launch.cuh"

namespace lockstep::detail {

/// A matrix M of a bucket, which is about P times the transpose of Q. P has its rows, Q its columns
/// as rows, and both have R columns; everything is in row-major order. The P of all matrices lie
/// one behind the other, and so do the Q.
struct PowerMatrix {
  std::size_t values;        // its first element in the bucket
  std::size_t rows;
  std::size_t columns;
  std::size_t first_row;     // of P, among those of all matrices
  std::size_t first_column;  // a row of Q, among those of all matrices
};

/// The matrices of a bucket, in device memory, in the order in which they lie in the bucket.
struct PowerMatrices {
  const PowerMatrix* matrices;
  std::size_t count;
  std::size_t rows;     // of all
  std::size_t columns;  // of all

  /// The last matrix whose `First` is not behind `index`.
  template <std::size_t PowerMatrix::* First>
  __device__ const PowerMatrix& at(std::size_t index) const {
    std::size_t low = 0;
    for (std::size_t high = count; high - low > 1;) {
      const std::size_t middle = low + (high - low) / 2;
      (matrices[middle].*First <= index ? low : high) = middle;
    }
    return matrices[low];
  }
};

struct PowerShape {
  static constexpr unsigned threads = 256;
  /// A column is cut into so many pieces, whose sums are made at once and then added up.
  static constexpr std::size_t pieces = 32;
  /// Neighbouring elements of a thread, where each is written by itself.
  static constexpr std::size_t elements = 4;
};

inline unsigned power_blocks(std::size_t count) {
  return static_cast<unsigned>((count + PowerShape::threads - 1) / PowerShape::threads);
}

/// M += residual, which M replaces there, and P = M Q. A block has a row of a matrix, and reads it
/// once.
template <unsigned R, class T>
LOCKSTEP_KERNEL __launch_bounds__(PowerShape::threads)
    begin_power(PowerMatrices all, const T* gradients, T* residual, const T* q, T* p) {
  using A = Accumulator<T>;
  using Reduce = cub::BlockReduce<A, PowerShape::threads>;
  const PowerMatrix matrix = all.template at<&PowerMatrix::first_row>(blockIdx.x);
  const std::size_t first = matrix.values + (blockIdx.x - matrix.first_row) * matrix.columns;
  const T* const factor = q + matrix.first_column * R;
  A sums[R] = {};
  for (std::size_t j = threadIdx.x; j < matrix.columns; j += PowerShape::threads) {
    const T value = static_cast<T>(static_cast<A>(gradients[first + j]) +
                                   static_cast<A>(residual[first + j]));
    residual[first + j] = value;
#pragma unroll
    for (unsigned r = 0; r < R; ++r)
      sums[r] += static_cast<A>(value) * static_cast<A>(factor[j * R + r]);
  }
  __shared__ typename Reduce::TempStorage storage[R];
#pragma unroll
  for (unsigned r = 0; r < R; ++r) {
    const A sum = Reduce(storage[r]).Sum(sums[r]);
    if (threadIdx.x == 0) p[blockIdx.x * R + r] = static_cast<T>(sum);
  }
}

/// Sums of pieces of Q = transpose of M, times P. A thread has a column.
template <unsigned R, class T>
LOCKSTEP_KERNEL __launch_bounds__(PowerShape::threads)
    sum_power_columns(PowerMatrices all, const T* values, const T* p, Accumulator<T>* partials) {
  using A = Accumulator<T>;
  const std::size_t column = std::size_t{blockIdx.x} * PowerShape::threads + threadIdx.x;
  if (column >= all.columns) return;
  const PowerMatrix matrix = all.template at<&PowerMatrix::first_column>(column);
  const std::size_t length = (matrix.rows + PowerShape::pieces - 1) / PowerShape::pieces;
  const std::size_t first = blockIdx.y * length;
  const std::size_t last = first + length < matrix.rows ? first + length : matrix.rows;
  const T* const from = values + matrix.values + (column - matrix.first_column);
  const T* const factor = p + matrix.first_row * R;
  A sums[R] = {};
  for (std::size_t i = first; i < last; ++i) {
    const auto value = static_cast<A>(from[i * matrix.columns]);
#pragma unroll
    for (unsigned r = 0; r < R; ++r) sums[r] += value * static_cast<A>(factor[i * R + r]);
  }
#pragma unroll
  for (unsigned r = 0; r < R; ++r) partials[(blockIdx.y * all.columns + column) * R + r] = sums[r];
}

/// Adds up the sums of pieces.
template <class T>
LOCKSTEP_KERNEL __launch_bounds__(PowerShape::threads)
    add_power_pieces(const Accumulator<T>* partials, T* q, std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * PowerShape::threads + threadIdx.x;
  if (i >= count) return;
  Accumulator<T> sum = 0;
  for (std::size_t piece = 0; piece < PowerShape::pieces; ++piece)
    sum += partials[piece * count + i];
  q[i] = static_cast<T>(sum);
}

/// M = P times the transpose of Q; the residual, which was this rank's M, keeps what that is not.
template <unsigned R, class T>
LOCKSTEP_KERNEL __launch_bounds__(PowerShape::threads)
    expand_power(PowerMatrices all, const T* p, const T* q, T* gradients, T* residual,
                 std::size_t count) {
  using A = Accumulator<T>;
  std::size_t at = (std::size_t{blockIdx.x} * PowerShape::threads + threadIdx.x) *
                   PowerShape::elements;
  const std::size_t end = at + PowerShape::elements < count ? at + PowerShape::elements : count;
  for (; at < end; ++at) {
    const PowerMatrix& matrix = all.template at<&PowerMatrix::values>(at);
    if (at < matrix.values || at - matrix.values >= matrix.rows * matrix.columns) continue;
    std::size_t i = (at - matrix.values) / matrix.columns;
    std::size_t j = (at - matrix.values) % matrix.columns;
    const std::size_t stop = matrix.values + matrix.rows * matrix.columns;
    for (; at < end && at < stop; ++at) {
      const T* const row = p + (matrix.first_row + i) * R;
      const T* const column = q + (matrix.first_column + j) * R;
      A sum = 0;
#pragma unroll
      for (unsigned r = 0; r < R; ++r) sum += static_cast<A>(row[r]) * static_cast<A>(column[r]);
      const T value = static_cast<T>(sum);
      gradients[at] = value;
      residual[at] = static_cast<T>(static_cast<A>(residual[at]) - static_cast<A>(value));
      if (++j == matrix.columns) {
        j = 0;
        ++i;
      }
    }
    --at;  // the outer loop goes on behind the matrix
  }
}

/// The threads that make one matrix orthogonal wait for each other. Another compiler than nvcc runs
/// them one after the other, and so there is one.
#if defined(__CUDACC__)
inline constexpr unsigned orthogonal_threads = 256;
#else
inline constexpr unsigned orthogonal_threads = 1;
#endif

/// The sum over a block's threads, for all of them.
template <class A>
__device__ A sum_of_block(A value) {
  using Reduce = cub::BlockReduce<A, orthogonal_threads>;
  __shared__ typename Reduce::TempStorage storage;
  __shared__ A sum;
  const A own = Reduce(storage).Sum(value);
  if (threadIdx.x == 0) sum = own;
  __syncthreads();
  const A all = sum;
  __syncthreads();  // before somebody uses the memory again
  return all;
}

/// Makes the columns of thin matrices orthonormal, by Gram and Schmidt's method as PyTorch does it:
/// a column is divided by its norm plus epsilon, and then taken out of those behind it. A block has
/// a matrix.
template <unsigned R, class T>
LOCKSTEP_KERNEL __launch_bounds__(orthogonal_threads)
    orthogonalize(const PowerMatrix* matrices, std::size_t PowerMatrix::* extent,
                  std::size_t PowerMatrix::* first, T* factors, Accumulator<T> epsilon) {
  using A = Accumulator<T>;
  const PowerMatrix& matrix = matrices[blockIdx.x];
  const std::size_t rows = matrix.*extent;
  T* const factor = factors + matrix.*first * R;
  for (unsigned c = 0; c < R; ++c) {
    A squares = 0;
    for (std::size_t i = threadIdx.x; i < rows; i += orthogonal_threads) {
      const auto value = static_cast<A>(factor[i * R + c]);
      squares += value * value;
    }
    const A norm = sqrt(sum_of_block(squares)) + epsilon;
    for (std::size_t i = threadIdx.x; i < rows; i += orthogonal_threads)
      factor[i * R + c] = static_cast<T>(static_cast<A>(factor[i * R + c]) / norm);
    for (unsigned d = c + 1; d < R; ++d) {
      A product = 0;
      for (std::size_t i = threadIdx.x; i < rows; i += orthogonal_threads)
        product += static_cast<A>(factor[i * R + c]) * static_cast<A>(factor[i * R + d]);
      const A share = sum_of_block(product);
      for (std::size_t i = threadIdx.x; i < rows; i += orthogonal_threads) {
        factor[i * R + d] = static_cast<T>(static_cast<A>(factor[i * R + d]) -
                                           share * static_cast<A>(factor[i * R + c]));
      }
    }
  }
}

}  // namespace lockstep::detail

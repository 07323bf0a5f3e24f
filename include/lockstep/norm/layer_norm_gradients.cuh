// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file All gradients of a layer norm in one pass over x and dy, for rows that a block can hold.
/// Blocks take row after row, and threads the same columns of each, so that the sums for weight
/// and bias stay in registers. A second launch adds the sums of blocks up.

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/vector.cuh"
#include "lockstep/norm/channel_numbers.cuh"
#include "lockstep/norm/channel_sums.cuh"
#include "lockstep/norm/layer_norm_kernels.cuh"

namespace lockstep::detail {

/// Columns of a thread: it has two sums for each of them.
inline constexpr unsigned row_columns = 16;
/// Blocks that take rows: as many as run at once on an H200. A constant, so that sums are the same
/// on every GPU.
inline constexpr unsigned most_row_blocks = 264;
/// Rows that a thread sums in the arithmetic of elements before it hands the sums on.
inline constexpr unsigned rows_of_sums = 64;

/// How many threads share a row of so many packets of N.
template <std::size_t N>
ColumnTile held_tile(std::size_t packets) {
  unsigned shift = 0;
  while (shift != 8 && (std::size_t{row_columns / N} << shift) < packets) ++shift;
  return {shift};
}
/// Can a block hold a row?
inline bool is_held_row(std::size_t features) { return features <= channel_threads * row_columns; }

/// A block's sums for a column: those for the bias and for the weight.
template <class T>
using ColumnSums = Packet<Accumulator<T>, 2>;

/// `ColumnSums` of all blocks.
template <class T>
std::size_t row_sum_bytes(std::size_t features) {
  return most_row_blocks * features * sizeof(ColumnSums<T>);
}

/// A thread's part of a row. What is outside of the matrix is zero, and adds nothing to any sum.
template <std::size_t N, class T>
struct HeldRow {
  static constexpr unsigned packets = row_columns / N;
  /// Is there room in registers for the next row too?
  static constexpr bool loads_ahead = row_columns * sizeof(T) <= 32 && N != 1;
  Packet<T, N> x[packets];
  Packet<T, N> dy[packets];
  KeptNumbers numbers;
};

/// How values of a row are normalised, in two instructions.
template <class A>
struct RowNumbers {
  A mean;
  A scale;
  A shift;  // what the mean is more than A can say, scaled

  __device__ explicit RowNumbers(const KeptNumbers& kept) {
    const SplitMean<A> split(kept.mean);
    mean = split.high;
    scale = static_cast<A>(kept.inverse);
    shift = -split.low * scale;
  }
  __device__ A normalised(A value) const { return std::fma(value - mean, scale, shift); }
};

/// Where the columns of a thread are.
template <std::size_t N>
struct HeldColumns {
  std::size_t features;
  ColumnTile tile;

  __device__ std::size_t at(unsigned u) const {
    return (std::size_t{u} * tile.lanes() + tile.lane()) * N;
  }
  __device__ bool has(unsigned u) const { return at(u) < features; }
};

/// The sums of the threads that share a row. Called for one row after the other, with 0 and 1 in
/// turn: a warp that is ahead of others leaves what they still read.
__device__ inline ChannelSums sum_over_row(ChannelSums sums, unsigned lanes, unsigned turn) {
  for (unsigned other = (lanes < 32 ? lanes : 32) / 2; other != 0; other /= 2) {
    sums = sums + ChannelSums{__shfl_xor_sync(0xffffffffu, sums.first, other),
                              __shfl_xor_sync(0xffffffffu, sums.second, other)};
  }
  if (lanes <= 32) return sums;
  __shared__ ChannelSums of_warps[2][channel_threads / 32];
  if (threadIdx.x % 32 == 0) of_warps[turn][threadIdx.x / 32] = sums;
  __syncthreads();
  const unsigned first = threadIdx.x / lanes * lanes / 32;
  sums = of_warps[turn][first];
  for (unsigned warp = 1; warp < lanes / 32; ++warp) sums = sums + of_warps[turn][first + warp];
  return sums;
}

/// With n for normalised values and g = dy * weight: dx = (g - mean(g) - n * mean(g * n)) *
/// inverse. A block's sums of dy and of dy * n go to `block_sums`. dx may be dy's memory.
template <std::size_t N, class T, class W>
LOCKSTEP_KERNEL __launch_bounds__(channel_threads, sizeof(Accumulator<T>) == 8 || N == 1 ? 1 : 2)
    gradients_of_rows(const T* x, const T* dy, T* dx, const W* weights, const KeptNumbers* kept,
                      ColumnSums<T>* block_sums, std::size_t rows, std::size_t features,
                      ColumnTile tile) {
  using A = Accumulator<T>;
  using Held = HeldRow<N, T>;
  const HeldColumns<N> columns{features, tile};
  const auto load = [&](std::size_t row) {
    Held held;
    const bool inside = row < rows;
#pragma unroll
    for (unsigned u = 0; u < Held::packets; ++u) {
      held.x[u] = {};
      held.dy[u] = {};
      if (!inside || !columns.has(u)) continue;
      const std::size_t at = row * features + columns.at(u);
      held.x[u] = load_packet<Caching::stream, N>(x + at);
      held.dy[u] = load_packet<Caching::stream, N>(dy + at);
    }
    held.numbers = inside ? load_kept(kept + row) : KeptNumbers{0, 0};
    return held;
  };
  // Calls f(i, dy, g, n) for the elements of a packet.
  const auto for_each = [&](const Held& held, const RowNumbers<A>& numbers, unsigned u,
                            const auto& f) {
    Packet<A, N> weight{};
    if (columns.has(u)) weight = load_features<A, N>(weights + columns.at(u));
#pragma unroll
    for (unsigned i = 0; i < N; ++i) {
      const A gradient = static_cast<A>(held.dy[u].at[i]);
      f(i, gradient, gradient * weight.at[i], numbers.normalised(static_cast<A>(held.x[u].at[i])));
    }
  };

  A of_bias[row_columns] = {};
  A of_weight[row_columns] = {};
  const auto hand_on = [&](bool again) {
    __shared__ ColumnSums<T> shared[N][channel_threads];
#pragma unroll
    for (unsigned u = 0; u < Held::packets; ++u) {
#pragma unroll
      for (unsigned i = 0; i < N; ++i) {
        shared[i][threadIdx.x] = {of_bias[u * N + i], of_weight[u * N + i]};
        of_bias[u * N + i] = 0;
        of_weight[u * N + i] = 0;
      }
      for (unsigned half = tile.rows() / 2; half != 0; half /= 2) {
        __syncthreads();
        if (tile.row() >= half) continue;
#pragma unroll
        for (unsigned i = 0; i < N; ++i) {
          ColumnSums<T>& own = shared[i][threadIdx.x];
          const ColumnSums<T>& other = shared[i][threadIdx.x + half * tile.lanes()];
          own = {own.at[0] + other.at[0], own.at[1] + other.at[1]};
        }
      }
      if (tile.row() == 0 && columns.has(u)) {
#pragma unroll
        for (unsigned i = 0; i < N; ++i) {
          ColumnSums<T>& total = block_sums[blockIdx.x * features + columns.at(u) + i];
          const ColumnSums<T> own = shared[i][threadIdx.x];
          total = again ? ColumnSums<T>{total.at[0] + own.at[0], total.at[1] + own.at[1]} : own;
        }
      }
      __syncthreads();
    }
  };

  const double share = 1 / static_cast<double>(features);
  const std::size_t step = std::size_t{gridDim.x} * tile.rows();
  unsigned taken = 0;
  bool again = false;
  std::size_t row = std::size_t{blockIdx.x} * tile.rows() + tile.row();
  Held next;
  if constexpr (Held::loads_ahead) next = load(row);
  for (; row - tile.row() < rows; row += step) {
    const Held held = Held::loads_ahead ? next : load(row);
    if constexpr (Held::loads_ahead) next = load(row + step);
    const RowNumbers<A> numbers(held.numbers);
    A sum = 0;
    A products = 0;
#pragma unroll
    for (unsigned u = 0; u < Held::packets; ++u) {
      for_each(held, numbers, u, [&](unsigned i, A gradient, A g, A normalised) {
        sum += g;
        products = std::fma(g, normalised, products);
        of_bias[u * N + i] += gradient;
        of_weight[u * N + i] = std::fma(gradient, normalised, of_weight[u * N + i]);
      });
    }
    const ChannelSums sums = sum_over_row({static_cast<double>(sum), static_cast<double>(products)},
                                          tile.lanes(), taken % 2);
    const double factor = -held.numbers.inverse * share;
    const A offset = static_cast<A>(sums.first * factor);
    const A slope = static_cast<A>(sums.second * factor);
#pragma unroll
    for (unsigned u = 0; u < Held::packets; ++u) {
      if (row >= rows || !columns.has(u)) continue;
      Packet<T, N> values;
      for_each(held, numbers, u, [&](unsigned i, A, A g, A normalised) {
        values.at[i] =
            static_cast<T>(std::fma(g, numbers.scale, std::fma(normalised, slope, offset)));
      });
      store_packet<Caching::keep>(dx + row * features + columns.at(u), values);
    }
    const bool is_last = row - tile.row() + step >= rows;
    if (++taken % rows_of_sums == 0 || is_last) {
      hand_on(again);
      again = true;
    }
  }
}

/// The columns whose sums a block of `add_row_blocks` adds up.
inline constexpr ColumnTile added_columns{3};
inline unsigned column_blocks(std::size_t features) {
  constexpr std::size_t added = 1u << added_columns.shift;
  return static_cast<unsigned>((features + added - 1) / added);
}

/// Adds up the sums of blocks, a thread for each column of some blocks.
template <class T, class G>
LOCKSTEP_KERNEL __launch_bounds__(channel_threads)
    add_row_blocks(const ColumnSums<T>* block_sums, unsigned blocks, std::size_t features,
                   WriteGradients<G> write) {
  const ColumnTile tile = added_columns;
  __shared__ ChannelSums shared[channel_threads];
  const std::size_t c = std::size_t{blockIdx.x} * tile.lanes() + tile.lane();
  ChannelSums sums{};
  if (c < features) {
#pragma unroll 4
    for (unsigned k = tile.row(); k < blocks; k += tile.rows()) {
      const auto own = load_packet<Caching::stream, 1>(block_sums + k * features + c).at[0];
      sums = sums + ChannelSums{static_cast<double>(own.at[0]), static_cast<double>(own.at[1])};
    }
  }
  shared[threadIdx.x] = sums;
  for (unsigned half = tile.rows() / 2; half != 0; half /= 2) {
    __syncthreads();
    if (tile.row() < half)
      shared[threadIdx.x] = shared[threadIdx.x] + shared[threadIdx.x + half * tile.lanes()];
  }
  if (tile.row() == 0 && c < features) write(c, 0, shared[threadIdx.x]);
}

}  // namespace lockstep::detail

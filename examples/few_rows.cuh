// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A linear layer's products in float for few rows, with bias, ReLU or gate in the same
/// kernel.

#include <cuda_pipeline_primitives.h>

#include <cstddef>

#include "lockstep/lockstep.cuh"

/// A product of 64 rows is small for a GPU: in tiles as large as libraries have them it occupies a
/// few multiprocessors, and libraries therefore cut the sums into parts that a second kernel adds
/// up. Here tiles are small instead, 128 for 64 x 512 results, and the warps of a block share its
/// sums.
///
/// Rows of all matrices are multiples of 16 bytes, and start at them.
namespace few_rows {

/// Which index runs fastest through an operand's memory: that of the sum, or that of the result.
enum class Fastest { term, result };

/// A block's tile of the result: warps along its rows and columns, 16 x 16 each, and warps that
/// share the sums. It takes the operands through shared memory, `Chunk` terms at a time.
template <int WarpRows, int WarpColumns, int Slices, int Chunk>
struct Tile {
  static constexpr int rows = 16 * WarpRows;
  static constexpr int columns = 16 * WarpColumns;
  static constexpr int slices = Slices;
  static constexpr int warp_columns = WarpColumns;
  static constexpr int chunk = Chunk;
  static constexpr int threads = 32 * WarpRows * WarpColumns * Slices;
};

/// One operand's part of a chunk, as it lies in memory. Padding spreads what a warp reads at once
/// over all banks.
template <Fastest F, int Results, int Terms>
struct alignas(16) Panel {
  static constexpr int height = F == Fastest::term ? Results : Terms;
  static constexpr int width = F == Fastest::term ? Terms : Results;
  static constexpr int padding = F == Fastest::term ? 8 : 4;
  float values[height][width + padding];

  /// Starts copies from a matrix of `results` x `terms`; zeroes where it ends.
  __device__ void fetch(const float* from, int result, int term, int results, int terms) {
    const int row = F == Fastest::term ? result : term;
    const int column = F == Fastest::term ? term : result;
    const int rows = F == Fastest::term ? results : terms;
    const int columns = F == Fastest::term ? terms : results;
    for (int i = static_cast<int>(threadIdx.x); i < height * width / 4; i += blockDim.x) {
      const int y = i / (width / 4);
      const int x = i % (width / 4) * 4;
      const bool inside = row + y < rows && column + x < columns;
      const std::size_t offset = static_cast<std::size_t>(row + y) * columns + column + x;
      __pipeline_memcpy_async(&values[y][x], inside ? from + offset : from, 16, inside ? 0 : 16);
    }
  }

  /// Which of a warp's 16 results is the i-th of `lane`, one of four.
  static __device__ int index(int lane, int i) {
    return F == Fastest::term ? 4 * i + lane : 4 * lane + i;
  }

  /// A lane's four results, from the warp's `first` on, for four terms: v[result][term].
  __device__ void read(float (&v)[4][4], int first, int lane, int term) const {
    for (int i = 0; i < 4; ++i) {
      if constexpr (F == Fastest::term) {
        const auto four = reinterpret_cast<const float4&>(values[first + index(lane, i)][term]);
        v[i][0] = four.x, v[i][1] = four.y, v[i][2] = four.z, v[i][3] = four.w;
      } else {
        const auto four = reinterpret_cast<const float4&>(values[term + i][first + 4 * lane]);
        v[0][i] = four.x, v[1][i] = four.y, v[2][i] = four.z, v[3][i] = four.w;
      }
    }
  }
};

/// d[m][n] = finish(sum over k of a[m][k] b[n][k], m, n), in an order that never changes.
/// `row_sums`, if not null, gets the sum over k of a[m][k].
template <class T, Fastest FastestA, Fastest FastestB, class Finish>
LOCKSTEP_KERNEL __launch_bounds__(T::threads)
    product(const float* a, const float* b, float* d, int m, int n, int k, Finish finish,
            float* row_sums) {
  constexpr int stages = 4;
  using PanelA = Panel<FastestA, T::rows, T::chunk>;
  using PanelB = Panel<FastestB, T::columns, T::chunk>;
  __shared__ PanelA panels_a[stages];
  __shared__ PanelB panels_b[stages];
  __shared__ float sums[T::slices][T::rows][T::columns + 1];

  const int row = static_cast<int>(blockIdx.y) * T::rows;
  const int column = static_cast<int>(blockIdx.x) * T::columns;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int slice = warp % T::slices;
  const int warp_row = warp / T::slices / T::warp_columns * 16;
  const int warp_column = warp / T::slices % T::warp_columns * 16;
  // Half a warp multiplies 16 x 16 results, 4 x 4 per lane; the other half does so for other terms.
  const int half = static_cast<int>(threadIdx.x) % 32 / 16;
  const int y = static_cast<int>(threadIdx.x) % 16 / 4;
  const int x = static_cast<int>(threadIdx.x) % 4;

  const auto fetch = [&](int chunk) {
    if (chunk * T::chunk < k) {
      panels_a[chunk % stages].fetch(a, row, chunk * T::chunk, m, k);
      panels_b[chunk % stages].fetch(b, column, chunk * T::chunk, n, k);
    }
    __pipeline_commit();
  };

  float results[4][4] = {};
  float totals[4] = {};
  for (int chunk = 0; chunk < stages - 1; ++chunk) fetch(chunk);
  for (int chunk = 0; chunk * T::chunk < k; ++chunk) {
    __pipeline_wait_prior(stages - 2);
    __syncthreads();  // the chunk is there, and the one before it is done with
    fetch(chunk + stages - 1);
#pragma unroll
    for (int part = 0; part < T::chunk; part += 8 * T::slices) {
      const int term = part + 8 * slice + 4 * half;
      float u[4][4];
      float v[4][4];
      panels_a[chunk % stages].read(u, warp_row, y, term);
      panels_b[chunk % stages].read(v, warp_column, x, term);
      for (int t = 0; t < 4; ++t) {
        for (int i = 0; i < 4; ++i) {
          for (int j = 0; j < 4; ++j) results[i][j] += u[i][t] * v[j][t];
        }
      }
      if (row_sums != nullptr && blockIdx.x == 0) {
        for (int t = 0; t < 4; ++t) {
          for (int i = 0; i < 4; ++i) totals[i] += u[i][t];
        }
      }
    }
  }

  for (int i = 0; i < 4; ++i) {
    const int r = warp_row + PanelA::index(y, i);
    for (int j = 0; j < 4; ++j) {
      results[i][j] += __shfl_xor_sync(0xffffffffu, results[i][j], 16);
      if (half == 0) sums[slice][r][warp_column + PanelB::index(x, j)] = results[i][j];
    }
    totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 16);
    if constexpr (T::slices == 1) {
      const bool first = half == 0 && x == 0 && warp_column == 0 && blockIdx.x == 0;
      if (row_sums != nullptr && first && row + r < m) row_sums[row + r] = totals[i];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < T::rows * T::columns; i += T::threads) {
    const int r = i / T::columns;
    const int c = i % T::columns;
    if (row + r >= m || column + c >= n) continue;
    float sum = 0;
    for (int s = 0; s < T::slices; ++s) sum += sums[s][r][c];
    d[static_cast<std::size_t>(row + r) * n + column + c] = finish(sum, row + r, column + c);
  }
}

struct BiasThenRelu {
  const float* bias;
  __device__ float operator()(float sum, int, int column) const {
    const float value = sum + bias[column];
    return value < 0 ? 0 : value;  // NaN stays NaN
  }
};

/// Errors go on where the unit was active.
struct Gate {
  const float* outputs;
  int columns;
  __device__ float operator()(float sum, int row, int column) const {
    return outputs[static_cast<std::size_t>(row) * columns + column] <= 0 ? 0 : sum;
  }
};

struct AsItIs {
  __device__ float operator()(float sum, int, int) const { return sum; }
};

template <class T, Fastest FastestA, Fastest FastestB, class Finish>
void multiply(cudaStream_t stream, const float* a, const float* b, float* d, std::size_t m,
              std::size_t n, std::size_t k, Finish finish, float* row_sums = nullptr) {
  const dim3 grid(static_cast<unsigned>((n + T::columns - 1) / T::columns),
                  static_cast<unsigned>((m + T::rows - 1) / T::rows));
  product<T, FastestA, FastestB><<<grid, T::threads, 0, stream>>>(
      a, b, d, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), finish, row_sums);
  lockstep::check_launch("few_rows::product");
}

using LongSums = Tile<1, 1, 8, 64>;   // over features
using ShortSums = Tile<2, 4, 1, 16>;  // over rows

/// outputs = relu(inputs weight^T + bias)
inline void forward(cudaStream_t stream, std::size_t rows, std::size_t in, std::size_t out,
                    const float* inputs, const float* weight, const float* bias, float* outputs) {
  multiply<LongSums, Fastest::term, Fastest::term>(stream, inputs, weight, outputs, rows, out, in,
                                                   BiasThenRelu{bias});
}

/// The errors of the layer below, whose outputs were `inputs`: (errors weight), gated by ReLU.
inline void input_gradient(cudaStream_t stream, std::size_t rows, std::size_t in, std::size_t out,
                           const float* errors, const float* weight, const float* inputs,
                           float* result) {
  multiply<LongSums, Fastest::term, Fastest::result>(stream, errors, weight, result, rows, in, out,
                                                     Gate{inputs, static_cast<int>(in)});
}

/// weight = errors^T inputs, and bias = the sum of the errors' rows unless it is null.
inline void weight_gradient(cudaStream_t stream, std::size_t rows, std::size_t in, std::size_t out,
                            const float* errors, const float* inputs, float* weight, float* bias) {
  multiply<ShortSums, Fastest::result, Fastest::result>(stream, errors, inputs, weight, out, in,
                                                        rows, AsItIs{}, bias);
}

}  // namespace few_rows

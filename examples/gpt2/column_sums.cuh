// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Sums of the columns of tall matrices, in an order that never changes: gradients of biases,
/// and of a layer norm's scale and shift.

#include <array>
#include <cstddef>

#include "device_array.cuh"
#include "gpt2/row.cuh"
#include "lockstep/lockstep.cuh"

namespace gpt2 {

inline constexpr unsigned sum_columns = 32, sum_groups = 16;

/// Where the sums of three matrices with `width` columns go, those of null nowhere.
struct SumsOf3 {
  BFloat16 *first = nullptr, *second = nullptr, *third = nullptr;
};

/// Adds up the `parts` rows of `sums`, in each of which the matrices' columns follow each other.
static __global__ void __launch_bounds__(sum_columns* sum_groups)
    add_parts(const float* sums, unsigned parts, unsigned width, SumsOf3 to) {
  const unsigned column = blockIdx.x * sum_columns + threadIdx.x;
  const unsigned columns = gridDim.x * sum_columns;
  float sum = 0;
#pragma unroll 8
  for (unsigned part = threadIdx.y; part < parts; part += sum_groups)
    sum += sums[std::size_t{part} * columns + column];
  __shared__ float of_groups[sum_groups][sum_columns];
  of_groups[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0) return;
  for (unsigned group = 1; group < sum_groups; ++group) sum += of_groups[group][threadIdx.x];
  const unsigned matrix = column / width;
  BFloat16* const result = matrix == 0 ? to.first : matrix == 1 ? to.second : to.third;
  if (result != nullptr) result[column - matrix * width] = BFloat16(sum);
}

/// `sums` has `matrices` * `width` columns. **Stream**
inline void add_sums(cudaStream_t stream, const float* sums, unsigned parts, unsigned matrices,
                     std::size_t width, const SumsOf3& to) {
  const auto blocks = static_cast<unsigned>(matrices * width / sum_columns);
  add_parts<<<blocks, dim3(sum_columns, sum_groups), 0, stream>>>(sums, parts,
                                                                  static_cast<unsigned>(width), to);
  lockstep::check_launch("add_parts");
}

inline constexpr unsigned strip_threads = 128;
inline constexpr unsigned strip_rows = 128;

/// A thread sums a packet of columns over a strip of rows.
static __global__ void __launch_bounds__(strip_threads)
    sum_strips(const Packet* d, std::size_t rows, unsigned packets, float* sums) {
  const unsigned packet = blockIdx.x * strip_threads + threadIdx.x;
  if (packet >= packets) return;
  const std::size_t first = std::size_t{blockIdx.y} * strip_rows;
  const std::size_t last = first + strip_rows < rows ? first + strip_rows : rows;
  float sum[Packet::size] = {};
#pragma unroll 8
  for (std::size_t row = first; row < last; ++row) {
    const Packet own = d[row * packets + packet];
#pragma unroll
    for (unsigned i = 0; i < Packet::size; ++i) sum[i] += static_cast<float>(own.at[i]);
  }
  float* const to = sums + (std::size_t{blockIdx.y} * packets + packet) * Packet::size;
#pragma unroll
  for (unsigned i = 0; i < Packet::size; ++i) to[i] = sum[i];
}

/// Gradients of the biases of layers with at most `columns` outputs and `rows` rows.
class BiasGradients {
 public:
  BiasGradients(std::size_t rows, std::size_t columns)
      : rows_(rows),
        strips_(static_cast<unsigned>((rows + strip_rows - 1) / strip_rows)),
        sums_(strips_ * columns) {}

  /// bias = the sums of d's columns. **Stream**
  void operator()(cudaStream_t stream, const BFloat16* d, std::size_t columns, BFloat16* bias) {
    const auto packets = static_cast<unsigned>(columns / Packet::size);
    const dim3 blocks((packets + strip_threads - 1) / strip_threads, strips_);
    sum_strips<<<blocks, strip_threads, 0, stream>>>(reinterpret_cast<const Packet*>(d), rows_,
                                                     packets, sums_);
    lockstep::check_launch("sum_strips");
    add_sums(stream, sums_, strips_, 1, columns, {bias});
  }

 private:
  std::size_t rows_;
  unsigned strips_;
  DeviceArray<float> sums_;
};

}  // namespace gpt2

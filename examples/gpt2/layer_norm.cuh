// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Layer norms of rows of bfloat16, with what stands beside them in a transformer: the
/// embedding before the first, and the residual's and a bias's gradient behind each.

#include <algorithm>
#include <cstddef>

#include "device_array.cuh"
#include "gpt2/column_sums.cuh"
#include "gpt2/row.cuh"
#include "gpt2/windows.cuh"
#include "lockstep/lockstep.cuh"

/// The library's `LayerNorm` is a layer on its own: it would write a gradient that a second pass
/// adds to the residual's, and a third sums for the bias of the layer before.
namespace gpt2 {

struct Statistics {
  float mean;
  float inverse;  // 1 / standard deviation
};

/// A layer norm's two parameters, or where their gradients go.
template <class T>
struct ScaleAndShift {
  T* scale;
  T* shift;
};

inline constexpr float norm_epsilon = 1e-5f;
inline constexpr unsigned norm_threads = 128;
inline constexpr unsigned norm_rows = norm_threads / warp_size;  // at once in a block

template <std::size_t Width>
__device__ void normalize_row(Row<Width>& x, const ScaleAndShift<const BFloat16>& with,
                              BFloat16* to, Statistics* kept) {
  const float mean = x.sum([](float v, unsigned, unsigned) { return v; }) / Width;
  const float variance =
      x.sum([&](float v, unsigned, unsigned) { return (v - mean) * (v - mean); }) / Width;
  const float inverse = rsqrtf(variance + norm_epsilon);
  const auto scale = Row<Width>::of(with.scale), shift = Row<Width>::of(with.shift);
  x.for_each([&](float& v, unsigned p, unsigned i) {
    v = (v - mean) * inverse * scale.at[p][i] + shift.at[p][i];
  });
  x.store(to);
  if (Row<Width>::lane() == 0) *kept = {mean, inverse};
}

/// The row of this warp.
inline __device__ std::size_t warp_row() {
  return std::size_t{blockIdx.x} * norm_rows + threadIdx.x / warp_size;
}

template <std::size_t Width>
LOCKSTEP_KERNEL __launch_bounds__(norm_threads)
    normalize_rows(const BFloat16* from, std::size_t rows, ScaleAndShift<const BFloat16> with,
                   BFloat16* to, Statistics* kept) {
  const std::size_t row = warp_row();
  if (row >= rows) return;
  auto x = Row<Width>::of(from + row * Width);
  normalize_row<Width>(x, with, to + row * Width, kept + row);
}

/// embedded = token's row + position's row, and the first layer norm of it.
template <std::size_t Width>
LOCKSTEP_KERNEL __launch_bounds__(norm_threads)
    embed_rows(Windows windows, const BFloat16* of_tokens, const BFloat16* of_positions,
               BFloat16* embedded, ScaleAndShift<const BFloat16> with, BFloat16* to,
               Statistics* kept) {
  const std::size_t place = warp_row();
  if (place >= windows.places()) return;
  auto x = Row<Width>::of(of_tokens + std::size_t{windows.token(place)} * Width);
  const auto position = Row<Width>::of(of_positions + place % windows.length * Width);
  x.for_each([&](float& v, unsigned p, unsigned i) { v += position.at[p][i]; });
  x.round();
  x.store(embedded + place * Width);
  normalize_row<Width>(x, with, to + place * Width, kept + place);
}

/// From the gradient `dy` of a norm's output: d += its gradient by x, or d = it if not `Adds`. Each
/// block sums its rows' gradients of scale and shift, and d, into 3 x Width numbers of `sums`.
template <std::size_t Width, bool Adds>
LOCKSTEP_KERNEL __launch_bounds__(norm_threads, 3)
    normalize_back(const BFloat16* from, const BFloat16* dy_rows, std::size_t rows,
                   const Statistics* kept, const BFloat16* scale_row, BFloat16* d_rows,
                   float* sums) {
  using R = Row<Width>;
  R scale_sums{}, shift_sums{}, d_sums{};
  for (std::size_t row = warp_row(); row < rows; row += std::size_t{gridDim.x} * norm_rows) {
    auto x = R::of(from + row * Width);
    auto dy = R::of(dy_rows + row * Width);
    R d{};
    if constexpr (Adds) d = R::of(d_rows + row * Width);
    const auto scale = R::of(scale_row);
    const Statistics of = kept[row];
    x.for_each([&](float& v, unsigned p, unsigned i) {
      v = (v - of.mean) * of.inverse;
      shift_sums.at[p][i] += dy.at[p][i];
      scale_sums.at[p][i] += dy.at[p][i] * v;
      dy.at[p][i] *= scale.at[p][i];
    });
    const float mean = dy.sum([](float v, unsigned, unsigned) { return v; }) / Width;
    const float slope =
        dy.sum([&](float v, unsigned p, unsigned i) { return v * x.at[p][i]; }) / Width;
    d.for_each([&](float& v, unsigned p, unsigned i) {
      v += (dy.at[p][i] - mean - x.at[p][i] * slope) * of.inverse;
    });
    d.round();
    d.store(d_rows + row * Width);
    d.for_each([&](float& v, unsigned p, unsigned i) { d_sums.at[p][i] += v; });
  }
  __shared__ float all[3][Width];
  for (unsigned turn = 0; turn < norm_rows; ++turn) {
    if (threadIdx.x / warp_size == turn) {
      const auto add = [&](R& own, float* to) {
        own.for_each([&](float& v, unsigned p, unsigned i) {
          float& sum = to[R::place(p, i)];
          sum = turn == 0 ? v : sum + v;
        });
      };
      add(scale_sums, all[0]);
      add(shift_sums, all[1]);
      add(d_sums, all[2]);
    }
    __syncthreads();
  }
  for (unsigned i = threadIdx.x; i < 3 * Width; i += norm_threads)
    sums[std::size_t{blockIdx.x} * 3 * Width + i] = all[i / Width][i % Width];
}

/// The layer norms of a batch with `rows` rows.
template <std::size_t Width>
class LayerNorms {
 public:
  explicit LayerNorms(std::size_t rows)
      : rows_(rows),
        blocks_(static_cast<unsigned>(std::min<std::size_t>(most_blocks(), row_blocks()))),
        sums_(std::size_t{blocks_} * 3 * Width) {}

  void forward(cudaStream_t stream, const BFloat16* x, ScaleAndShift<const BFloat16> with,
               BFloat16* y, Statistics* kept) const {
    normalize_rows<Width><<<row_blocks(), norm_threads, 0, stream>>>(x, rows_, with, y, kept);
    lockstep::check_launch("normalize_rows");
  }

  void embed(cudaStream_t stream, const Windows& windows, const BFloat16* of_tokens,
             const BFloat16* of_positions, BFloat16* x, ScaleAndShift<const BFloat16> with,
             BFloat16* y, Statistics* kept) const {
    embed_rows<Width><<<row_blocks(), norm_threads, 0, stream>>>(windows, of_tokens, of_positions,
                                                                 x, with, y, kept);
    lockstep::check_launch("embed_rows");
  }

  /// `bias`: where the sums of d's columns go, if anywhere.
  template <bool Adds>
  void backward(cudaStream_t stream, const BFloat16* x, const BFloat16* dy, const Statistics* kept,
                const BFloat16* scale, BFloat16* d, ScaleAndShift<BFloat16> gradients,
                BFloat16* bias) {
    normalize_back<Width, Adds>
        <<<blocks_, norm_threads, 0, stream>>>(x, dy, rows_, kept, scale, d, sums_);
    lockstep::check_launch("normalize_back");
    add_sums(stream, sums_, blocks_, 3, Width, {gradients.scale, gradients.shift, bias});
  }

 private:
  unsigned row_blocks() const { return static_cast<unsigned>((rows_ + norm_rows - 1) / norm_rows); }
  /// As many as run at once.
  static std::size_t most_blocks() {
    int device = 0, processors = 0, each = 0;
    lockstep::check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    lockstep::check_cuda(
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
    lockstep::check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                             &each, normalize_back<Width, true>, norm_threads, 0),
                         "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return static_cast<std::size_t>(processors) * static_cast<std::size_t>(std::max(each, 1));
  }

  std::size_t rows_;
  unsigned blocks_;
  DeviceArray<float> sums_;
};

}  // namespace gpt2

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Layer norms in a GPU's memory: what `LayerNormWork` describes. Forward is one launch and
/// backward two, and all of them may be part of a captured step.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "lockstep/core/element.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/runtime.cuh"
#include "lockstep/norm/channel_sums.cuh"
#include "lockstep/norm/device_norm.cuh"
#include "lockstep/norm/layer_norm_kernels.cuh"
#include "lockstep/norm/work.hpp"

namespace lockstep::detail {

template <>
class LayerNormWork<DeviceMemory> {
 public:
  LayerNormWork() = default;

  /// **Host** blocks where there is not enough room: where there are more rows than ever.
  template <bool Keeps, class T, class W>
  void forward(cudaStream_t stream, std::size_t rows, std::size_t features, double eps, const T* x,
               const NormAffine<W>& affine, T* y) {
    if constexpr (Keeps) reserve(rows, features, row_sum_bytes<T>(features));
    if (rows * features == 0) return;
    using Value = SameElement<T>;
    using Weight = SameElement<W>;
    with_packets<Value>(
        features, are_aligned({x, y, affine.weight, affine.bias}), [&]<std::size_t N>() {
          const ColumnTile tile = row_tile(features / N);
          launch_kernel<normalise_rows_of<N, Value, Weight>>(
              "layer norm", stream, row_blocks(rows, tile), channel_threads,
              static_cast<const Value*>(x), static_cast<Value*>(y),
              NormAffine<Weight>{affine.weight, affine.bias}, Keeps ? kept() : nullptr, rows,
              features, 1 / static_cast<double>(features), eps, tile);
        });
  }

  template <class T, class W, class G>
  void backward(cudaStream_t stream, std::size_t rows, std::size_t features, const T* x,
                const T* dy, const NormAffine<W>& affine, const NormAffineGradients<G>& gradients,
                T* dx) {
    if (rows * features == 0) {
      zero_device(stream, gradients.weight, features * sizeof(G));
      zero_device(stream, gradients.bias, features * sizeof(G));
      return;
    }
    using Value = SameElement<T>;
    using Weight = SameElement<W>;
    const WriteGradients<SameElement<G>> write{{gradients.weight, gradients.bias}};
    const bool aligned = are_aligned({x, dy, dx, affine.weight});
    if (is_held_row(features)) {
      unsigned of_rows = 0;
      with_packets<Value>(features, aligned, [&]<std::size_t N>() {
        const ColumnTile tile = held_tile<N>(features / N);
        of_rows = std::min(row_blocks(rows, tile), most_row_blocks);
        launch_kernel<gradients_of_rows<N, Value, Weight>>(
            "gradients of a layer norm", stream, of_rows, channel_threads,
            static_cast<const Value*>(x), static_cast<const Value*>(dy), static_cast<Value*>(dx),
            static_cast<const Weight*>(affine.weight), static_cast<const KeptNumbers*>(kept()),
            column_sums<Value>(), rows, features, tile);
      });
      launch_kernel<add_row_blocks<Value, SameElement<G>>>(
          "gradients of a layer norm's weights", stream, column_blocks(features), channel_threads,
          static_cast<const ColumnSums<Value>*>(column_sums<Value>()), of_rows, features, write);
      return;
    }
    // The sums go first, because dx may be dy's memory.
    launch_column_sums("gradients of a layer norm's weights", stream, NormShape{rows, features, 1},
                       are_aligned({x, dy}), RowGradientTerm<Value>{x, dy, kept()}, blocks(),
                       write);
    with_packets<Value>(features, aligned, [&]<std::size_t N>() {
      const ColumnTile tile = row_tile(features / N);
      launch_kernel<gradient_of_rows<N, Value, Weight>>(
          "gradient of a layer norm", stream, row_blocks(rows, tile), channel_threads,
          static_cast<const Value*>(x), static_cast<const Value*>(dy), static_cast<Value*>(dx),
          static_cast<const Weight*>(affine.weight), static_cast<const KeptNumbers*>(kept()), rows,
          features, tile);
    });
  }

 private:
  /// Captured steps go on using the memory that they were captured with, so that it stays.
  void reserve(std::size_t rows, std::size_t features, std::size_t row_sums) {
    if (rows > rows_) {
      rows_ = std::max(rows, 2 * rows_);
      kept_.emplace_back(rows_ * sizeof(KeptNumbers));
    }
    const std::size_t sums =
        is_held_row(features) ? row_sums : most_block_sums(features) * sizeof(ChannelSums);
    if (features != features_ || sums > block_sums_.bytes()) {
      block_sums_ = DeviceArena(sums);
      arrived_ = DeviceArena((features + 1) * sizeof(unsigned));
      features_ = features;
    }
  }

  KeptNumbers* kept() const { return reinterpret_cast<KeptNumbers*>(kept_.back().data()); }
  template <class T>
  ColumnSums<T>* column_sums() const {
    return reinterpret_cast<ColumnSums<T>*>(block_sums_.data());
  }
  BlockSums blocks() const {
    return {reinterpret_cast<ChannelSums*>(block_sums_.data()),
            reinterpret_cast<unsigned*>(arrived_.data())};
  }

  std::size_t rows_ = 0;
  std::size_t features_ = 0;
  std::vector<DeviceArena> kept_;  // the last one is the largest
  DeviceArena block_sums_{0};
  DeviceArena arrived_{0};
};

}  // namespace lockstep::detail

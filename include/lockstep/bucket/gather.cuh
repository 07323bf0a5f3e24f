// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gathers gradients that lie in tensors of their own into a bucket, in one launch. Sizes and
/// offsets are constants of the kernel.

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <utility>

#include "lockstep/bucket/pack.cuh"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/vector.cuh"

namespace lockstep::detail {

/// A bucket's tensors: how many elements each has, and where in the bucket it begins.
template <class Sizes, class Offsets>
struct BucketTensors;

template <std::size_t... Size, std::size_t... Offset>
struct BucketTensors<std::index_sequence<Size...>, std::index_sequence<Offset...>> {
  static constexpr std::size_t count = sizeof...(Size);
  static constexpr std::size_t sizes[] = {Size...};
  static constexpr std::size_t offsets[] = {Offset...};

  /// The first of a tensor's tiles, if tiles of so many elements go through the tensors in order.
  template <std::size_t Tensor, std::size_t Elements>
  static constexpr std::size_t first_tile = [] {
    std::size_t tiles = 0;
    for (std::size_t t = 0; t != Tensor; ++t) tiles += (sizes[t] + Elements - 1) / Elements;
    return tiles;
  }();
};

template <class TheLayout, std::size_t B, std::size_t... I>
constexpr auto tensors_of_bucket(std::index_sequence<I...>) {
  constexpr const auto& plan = TheLayout::plan();
  constexpr std::size_t begin = plan.bucket_table[B].offset;
  constexpr std::size_t size = element_size(plan.bucket_table[B].element);
  return BucketTensors<
      std::index_sequence<plan.placements[plan.members(B)[I]].bytes / size...>,
      std::index_sequence<(plan.placements[plan.members(B)[I]].offset - begin) / size...>>{};
}

/// The tensors of bucket B of a layout with static shapes, in order of arrival
/// (`BucketPlan::members`).
template <class TheLayout, std::size_t B>
using TensorsOf = decltype(tensors_of_bucket<TheLayout, B>(
    std::make_index_sequence<TheLayout::plan().bucket_table[B].parameters>{}));

template <class From, std::size_t Count>
struct TensorPointers {
  const From* at[Count];
};

/// The tensor that a tile belongs to, by comparisons with constants.
template <class Tensors, class Shape, std::size_t Begin, std::size_t End, class From, class To>
__device__ void gather_tile(const TensorPointers<From, Tensors::count>& tensors, std::size_t tile,
                            To* bucket, CastArithmetic<From, To> factor) {
  using Sweep = CastSweep<From, To>;
  if constexpr (End - Begin == 1) {
    constexpr std::size_t first = Tensors::template first_tile<Begin, Shape::tile * Sweep::packet>;
    constexpr std::size_t offset = Tensors::offsets[Begin];
    constexpr std::size_t size = Tensors::sizes[Begin];
    const Sweep sweep{tensors.at[Begin], bucket + offset, factor};
    sweep_tile<Shape, Sweep::packet>(sweep, tile - first, size);
  } else {
    constexpr std::size_t middle = (Begin + End) / 2;
    constexpr std::size_t first = Tensors::template first_tile<middle, Shape::tile * Sweep::packet>;
    if (tile < first) {
      gather_tile<Tensors, Shape, Begin, middle>(tensors, tile, bucket, factor);
    } else {
      gather_tile<Tensors, Shape, middle, End>(tensors, tile, bucket, factor);
    }
  }
}

template <class Tensors, class Shape, class From, class To>
LOCKSTEP_KERNEL __launch_bounds__(Shape::threads)
    gather(TensorPointers<From, Tensors::count> tensors, To* bucket,
           CastArithmetic<From, To> factor) {
  gather_tile<Tensors, Shape, 0, Tensors::count>(tensors, blockIdx.x, bucket, factor);
}

/// Scales, casts and packs the tensors into `bucket`; the gaps between them are not touched.
/// `Tensors` is a `TensorsOf<Layout, b>`. **Stream** in its order. **Host** does not block.
template <class Tensors, class Shape = PackShape, FloatingElement From, FloatingElement To>
void launch_gather(cudaStream_t stream, const std::array<const From*, Tensors::count>& tensors,
                   To* bucket, double factor) {
  using Sweep = CastSweep<From, To>;
  static_assert(Tensors::count > 0);
  TensorPointers<From, Tensors::count> pointers{};
  for (std::size_t t = 0; t != Tensors::count; ++t) {
    require_alignment("gather", {tensors[t], bucket + Tensors::offsets[t]});
    pointers.at[t] = tensors[t];
  }
  constexpr std::size_t tiles =
      Tensors::template first_tile<Tensors::count, Shape::tile * Sweep::packet>;
  if constexpr (tiles != 0) {
    gather<Tensors, Shape><<<static_cast<unsigned>(tiles), Shape::threads, 0, stream>>>(
        pointers, bucket, static_cast<typename Sweep::A>(factor));
    check_launch("gather");
  }
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Dropout on a GPU: one pass at memory bandwidth, bitwise the same as on the host.

#include "lockstep/detail/device/cuda/memory.cuh"
#include "lockstep/detail/device/cuda/vector.cuh"
#include "lockstep/detail/norm/dropout.hpp"

namespace lockstep::detail {

using DropoutShape = PassShape<256, 4>;

template <class T>
struct DropoutPass {
  using A = Accumulator<T>;

  const T* from;
  T* to;
  LayerRandom random;
  std::uint64_t below;
  A scale;

  template <std::size_t N>
  __device__ Packet<T, N> load(std::size_t at) const {
    return load_packet<Caching::keep, N>(from + at);
  }
  /// A packet of several elements starts at an even index.
  template <std::size_t N>
  __device__ void finish(std::size_t at, const Packet<T, N>& loaded) const {
    Packet<T, N> out;
    if constexpr (N == 1) {
      const std::uint32_t half = DropoutRule::half(random.bits(at / 2), at);
      out.at[0] = DropoutRule::apply<T>(half, below, scale, loaded.at[0]);
    } else {
#pragma unroll
      for (std::size_t i = 0; i < N; i += 2) {
        const std::uint64_t bits = random.bits((at + i) / 2);
#pragma unroll
        for (std::size_t k = 0; k < 2; ++k)
          out.at[i + k] =
              DropoutRule::apply<T>(DropoutRule::half(bits, k), below, scale, loaded.at[i + k]);
      }
    }
    store_packet<Caching::keep>(to + at, out);
  }
};

template <class Shape, std::size_t N, class T>
LOCKSTEP_KERNEL __launch_bounds__(Shape::threads)
    drop_elements(DeviceLayerRandom random, std::uint64_t below, Accumulator<T> scale,
                  const T* from, T* to, std::size_t count) {
  DropoutPass<T> pass{from, to, random.numbers(), below, scale};
  pass_over_tile<Shape, N>(pass, blockIdx.x, count);
}

template <>
struct DropoutPass<DeviceMemory> {
  template <class T>
  static void drop(auto& step, DeviceLayerRandom random, const DropoutRule& rule, const T* from,
                   T* to, std::size_t count) {
    const bool is_aligned =
        (reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to)) % 16 == 0;
    if (is_aligned) {
      launch<packet_size<T>>(step.stream(), random, rule, from, to, count);
    } else {  // for example rows of a larger tensor
      launch<1>(step.stream(), random, rule, from, to, count);
    }
  }
  template <class T>
  static void copy(auto& step, const T* from, T* to, std::size_t count) {
    if (to != from) copy_async(to, from, count * sizeof(T), step.stream());
  }

 private:
  template <std::size_t N, class T>
  static void launch(cudaStream_t stream, DeviceLayerRandom random, const DropoutRule& rule,
                     const T* from, T* to, std::size_t count) {
    if (count == 0) return;
    using E = SameElement<T>;
    const auto blocks = static_cast<unsigned>(tiles_of<DropoutShape, N>(count));
    launch_kernel<drop_elements<DropoutShape, N, E>>(
        "dropout", stream, blocks, DropoutShape::threads, random, rule.below,
        static_cast<Accumulator<E>>(rule.scale), from, to, count);
  }
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Vectorised passes over arrays at memory bandwidth: several 16-byte accesses per thread.

#include <cuda/std/bit>

#include "lockstep/detail/device/cuda/runtime.cuh"

namespace lockstep::detail {

/// Consecutive elements that one instruction loads or stores.
template <class T, std::size_t N>
struct Packet {
  T at[N];
};

/// Elements per packet: the widest type fills 16 bytes, narrower ones less, but contiguously.
template <class... T>
inline constexpr std::size_t packet_size = 16 / std::max({sizeof(T)...});

/// Cache hint: `stream` marks data that is not reused soon, which L2 may evict first.
enum class Caching { keep, stream };

/// Launch shape of a pass. A type, because nvcc cannot mangle values of class type in kernel names.
template <unsigned Threads, unsigned Packets, bool Streams = false>
struct PassShape {
  static constexpr unsigned threads = Threads;  // per block
  static constexpr unsigned packets = Packets;  // per thread, all loaded before the first is used
  /// The hint for data that is not reused before the next step.
  static constexpr Caching once = Streams ? Caching::stream : Caching::keep;
  static constexpr std::size_t tile = std::size_t{Threads} * Packets;  // packets per block
};

template <std::size_t Bytes>
using BitsOf = std::conditional_t<
    Bytes == 16, uint4,
    std::conditional_t<Bytes == 8, uint2,
                       std::conditional_t<Bytes == 4, unsigned int, unsigned short>>>;

/// Loads bypass L1, since nothing is read twice; intrinsics keep them before the pass's branches.
template <Caching How, std::size_t N, class T>
__device__ Packet<T, N> load_packet(const T* from) {
  const auto* bits = reinterpret_cast<const BitsOf<N * sizeof(T)>*>(from);
  if constexpr (How == Caching::stream) {
    return cuda::std::bit_cast<Packet<T, N>>(__ldcs(bits));
  } else {
    return cuda::std::bit_cast<Packet<T, N>>(__ldcg(bits));
  }
}

template <Caching How, std::size_t N, class T>
__device__ void store_packet(T* to, const Packet<T, N>& packet) {
  using Bits = BitsOf<N * sizeof(T)>;
  auto* bits = reinterpret_cast<Bits*>(to);
  if constexpr (How == Caching::stream) {
    __stcs(bits, cuda::std::bit_cast<Bits>(packet));
  } else {
    __stcg(bits, cuda::std::bit_cast<Bits>(packet));
  }
}

/// A block's tile: all `pass.load<N>(at)`, then `pass.finish<N>(at, loaded)`; at the end N = 1.
template <class Shape, std::size_t N, class Pass>
__device__ void pass_over_tile(Pass& pass, std::size_t tile, std::size_t count) {
  const std::size_t first = (tile * Shape::tile + threadIdx.x) * N;
  constexpr std::size_t stride = Shape::threads * N;
  decltype(pass.template load<N>(0)) loaded[Shape::packets];
  if ((tile + 1) * Shape::tile * N <= count) {
#pragma unroll
    for (unsigned k = 0; k < Shape::packets; ++k) {
      loaded[k] = pass.template load<N>(first + k * stride);
    }
#pragma unroll
    for (unsigned k = 0; k < Shape::packets; ++k) {
      pass.template finish<N>(first + k * stride, loaded[k]);
    }
    return;
  }
#pragma unroll
  for (unsigned k = 0; k < Shape::packets; ++k) {
    const std::size_t at = first + k * stride;
    if (at + N <= count) loaded[k] = pass.template load<N>(at);
  }
#pragma unroll
  for (unsigned k = 0; k < Shape::packets; ++k) {
    const std::size_t at = first + k * stride;
    if (at + N <= count) {
      pass.template finish<N>(at, loaded[k]);
    } else {
#pragma unroll 1
      for (std::size_t i = at; i < count; ++i) {
        pass.template finish<1>(i, pass.template load<1>(i));
      }
    }
  }
}

/// The number of blocks of a pass.
template <class Shape, std::size_t N>
LOCKSTEP_HOST_DEVICE constexpr std::size_t tiles_of(std::size_t count) {
  constexpr std::size_t elements = Shape::tile * N;
  return (count + elements - 1) / elements;
}

inline void require_alignment(const char* pass, std::initializer_list<const void*> arrays) {
  for (const void* array : arrays) {
    if (reinterpret_cast<std::uintptr_t>(array) % 16 == 0) continue;
    throw Error(pass, "an array does not begin at a multiple of 16 bytes",
                "give memory as allocators return it, or a piece that begins at such a multiple",
                rank_of_thread());
  }
}

}  // namespace lockstep::detail

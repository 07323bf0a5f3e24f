// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Passes over arrays at the speed of memory: several accesses of 16 bytes per thread.

#include <cuda_runtime.h>

#include <cuda/std/bit>
#include <initializer_list>

#include "lockstep/core/error.hpp"
#include "lockstep/device/cuda/runtime.cuh"

namespace lockstep::detail {

/// Neighbouring elements that one instruction loads or stores.
template <class T, std::size_t N>
struct Packet {
  T at[N];
};

/// How many elements a packet has in a pass over arrays of these types: the widest type fills 16
/// bytes. Narrower types fill less, but a warp's accesses are contiguous in every array.
template <class... T>
inline constexpr std::size_t packet_size = 16 / std::max({sizeof(T)...});

/// Is an element used again soon? If not, the L2 cache may drop it first.
enum class Caching { keep, stream };

/// How a pass is cut into threads. A type, because nvcc cannot write a value of class type into a
/// kernel's name.
template <unsigned Threads, unsigned Packets, bool Streams = false>
struct PassShape {
  static constexpr unsigned threads = Threads;  // of a block
  static constexpr unsigned packets = Packets;  // of a thread, all loaded before the first is used
  /// Caching of data that is not used again before the next step.
  static constexpr Caching once = Streams ? Caching::stream : Caching::keep;
  static constexpr std::size_t tile = std::size_t{Threads} * Packets;  // packets of a block
};

template <std::size_t Bytes>
using BitsOf = std::conditional_t<
    Bytes == 16, uint4,
    std::conditional_t<Bytes == 8, uint2,
                       std::conditional_t<Bytes == 4, unsigned int, unsigned short>>>;

/// Loads bypass the L1 cache, because nothing is used twice. The intrinsics keep their order, so
/// that first loads are under way before the pass branches.
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

/// One block's part of a pass over `count` elements: a tile of packets of N elements. It calls
/// `pass.load<N>(at)` for all packets of a thread, then `pass.finish<N>(at, loaded)` for each.
/// Elements after the last whole packet are packets of one.
template <class Shape, std::size_t N, class Pass>
__device__ void sweep_tile(Pass& pass, std::size_t tile, std::size_t count) {
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

/// The tiles of a pass, one for each block.
template <class Shape, std::size_t N>
LOCKSTEP_HOST_DEVICE constexpr std::size_t tiles_of(std::size_t count) {
  constexpr std::size_t elements = Shape::tile * N;
  return (count + elements - 1) / elements;
}

/// Throws unless all addresses are aligned to packets.
inline void require_alignment(const char* pass, std::initializer_list<const void*> arrays) {
  for (const void* array : arrays) {
    if (reinterpret_cast<std::uintptr_t>(array) % 16 == 0) continue;
    throw Error(pass, "an array does not begin at a multiple of 16 bytes",
                "give memory as allocators return it, or a piece that begins at such a multiple",
                rank_of_thread());
  }
}

}  // namespace lockstep::detail

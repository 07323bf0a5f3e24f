// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The kernels of collectives of ranks that share an address space: one launch reads and
/// writes all ranks' memory.

#include <cuda_runtime.h>

#include <cstddef>

#include "lockstep/comm/combine.cuh"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/vector.cuh"

namespace lockstep::detail::threads {

/// The most ranks that one process can have: a kernel's argument holds two pointers for each.
inline constexpr std::size_t most_ranks = 128;

/// Every rank's memory by a pointer. `Ranks` where the compiler knows it, else up to `most_ranks`.
template <class T, std::size_t Ranks>
struct RankPointers {
  static constexpr std::size_t static_ranks = Ranks;
  static constexpr std::size_t capacity = Ranks == dynamic ? most_ranks : Ranks;
  const T* at[capacity];
  __device__ const T* operator()(unsigned w) const { return at[w]; }
};

/// For source s and target t, the bytes at in[s] + t * in_stride go to out[t] + s * out_stride.
struct Movement {
  const unsigned char* in[most_ranks];
  unsigned char* out[most_ranks];
  PacketPass pass;
  std::size_t in_stride;
  std::size_t out_stride;
  unsigned targets;
};

/// `Dealt`: every target gets its own piece of a source. Otherwise all get the same, which is
/// loaded once.
template <bool Dealt>
struct Move {
  const Movement& work;
  unsigned source;

  template <std::size_t N>
  __device__ void at(std::size_t i) const {
    const unsigned char* const from = work.in[source] + i;
    const std::size_t to = source * work.out_stride + i;
    Packet<unsigned char, N> packet;
    if constexpr (!Dealt) packet = load_some<N>(from);
    for (unsigned t = 0; t < work.targets; ++t) {
      if constexpr (Dealt) packet = load_some<N>(from + t * work.in_stride);
      store_some<N>(work.out[t] + to, packet);
    }
  }
};

template <bool Dealt>
LOCKSTEP_KERNEL __launch_bounds__(PacketPass::threads)
    move_bytes(const __grid_constant__ Movement work) {
  work.pass.template sweep<16>(Move<Dealt>{work, blockIdx.y});
}

}  // namespace lockstep::detail::threads

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The kernels behind collectives of ranks that share an address space: from everybody's
/// memory to everybody's memory, in one launch.

#include <cuda_runtime.h>

#include <cstddef>

#include "lockstep/comm/combine.cuh"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/vector.cuh"

namespace lockstep::detail::threads {

/// The most ranks that one process can have: so many pointers, twice, travel as a kernel's
/// argument.
inline constexpr std::size_t most_ranks = 128;

/// Every rank's memory by a pointer. `Ranks` where the compiler knows it, else up to `most_ranks`.
template <class T, std::size_t Ranks>
struct RankPointers {
  static constexpr std::size_t static_ranks = Ranks;
  static constexpr std::size_t capacity = Ranks == dynamic ? most_ranks : Ranks;
  const T* at[capacity];
  __device__ const T* operator()(unsigned w) const { return at[w]; }
};

/// What is moved: for source s and target t, the bytes that lie t * in_stride behind in[s] go
/// to where out[t] has s * out_stride before them.
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

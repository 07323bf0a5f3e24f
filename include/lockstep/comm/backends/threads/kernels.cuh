// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The kernels behind collectives of ranks that share an address space: from everybody's
/// memory to everybody's memory, in one launch.

#include <cuda_runtime.h>

#include <cstddef>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/vector.cuh"

namespace lockstep::threads {

/// The most ranks that one process can have: so many pointers, twice, travel as a kernel's
/// argument.
inline constexpr std::size_t most_ranks = 128;

inline constexpr unsigned threads_per_block = 512;

/// A pass in packets of 16 bytes, and one element at a time behind the last whole one, or all the
/// way where something is not aligned.
struct Pass {
  std::size_t packets;
  std::size_t count;

  __host__ __device__ std::size_t steps(std::size_t per_packet) const {
    return packets + (count - packets * per_packet);
  }
};

/// A thread's first step and the distance to its next one.
inline __device__ std::size_t first_step() {
  return static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
inline __device__ std::size_t step_stride() {
  return static_cast<std::size_t>(gridDim.x) * blockDim.x;
}

/// Calls `f.at<N>(i)` with N elements at i, as the pass is cut.
template <std::size_t PerPacket, class F>
__device__ void sweep(const Pass& pass, const F& f) {
  const std::size_t steps = pass.steps(PerPacket);
  for (std::size_t i = first_step(); i < steps; i += step_stride()) {
    if (i < pass.packets) {
      f.template at<PerPacket>(i * PerPacket);
    } else {
      f.template at<1>(pass.packets * PerPacket + (i - pass.packets));
    }
  }
}

template <std::size_t N, class T>
__device__ Packet<T, N> load(const T* from) {
  if constexpr (N == 1) {
    return {*from};
  } else {
    return load_packet<Caching::keep, N>(from);
  }
}
template <std::size_t N, class T>
__device__ void store(T* to, const Packet<T, N>& packet) {
  if constexpr (N == 1) {
    *to = packet.at[0];
  } else {
    store_packet<Caching::keep, N>(to, packet);
  }
}

/// What is combined: piece p of every `in`, which lies p * stride behind its begin, goes to
/// `targets` of the outs, from out[p] on. `Ranks` where the compiler knows it, else up to
/// `most_ranks`.
template <class T, std::size_t Ranks>
struct Reduction {
  static constexpr std::size_t capacity = Ranks == dynamic ? most_ranks : Ranks;

  const T* in[capacity];
  T* out[capacity];
  Pass pass;
  std::size_t stride;
  unsigned targets;
  unsigned ranks;
};

template <class T, class Op, std::size_t Ranks>
struct Combine {
  const Reduction<T, Ranks>& work;
  const Op& op;
  unsigned piece;

  /// Every rank's value is loaded, in rank order, before any result is stored: outs may be ins.
  template <std::size_t N>
  __device__ void at(std::size_t i) const {
    using Accumulated = decltype(op.prepare(T{}));
    constexpr std::size_t together = Ranks == dynamic ? 4 : Ranks;
    const unsigned ranks = Ranks == dynamic ? work.ranks : static_cast<unsigned>(Ranks);
    const std::size_t from = piece * work.stride + i;
    Accumulated sum[N];
    const Packet<T, N> first = load<N>(work.in[0] + from);
#pragma unroll
    for (std::size_t j = 0; j < N; ++j) sum[j] = op.prepare(first.at[j]);
#pragma unroll together
    for (unsigned w = 1; w < ranks; ++w) {
      const Packet<T, N> next = load<N>(work.in[w] + from);
#pragma unroll
      for (std::size_t j = 0; j < N; ++j) sum[j] = op.combine(sum[j], op.prepare(next.at[j]));
    }
    Packet<T, N> result;
#pragma unroll
    for (std::size_t j = 0; j < N; ++j) result.at[j] = op.template finish<T>(sum[j], ranks);
#pragma unroll together
    for (unsigned t = 0; t < work.targets; ++t) store<N>(work.out[piece + t] + i, result);
  }
};

template <class T, class Op, std::size_t Ranks>
LOCKSTEP_KERNEL __launch_bounds__(threads_per_block)
    combine(const __grid_constant__ Reduction<T, Ranks> work, const Op op) {
  sweep<packet_size<T>>(work.pass, Combine<T, Op, Ranks>{work, op, blockIdx.y});
}

/// What is moved: for source s and target t, the bytes that lie t * in_stride behind in[s] go
/// to where out[t] has s * out_stride before them.
struct Movement {
  const unsigned char* in[most_ranks];
  unsigned char* out[most_ranks];
  Pass pass;
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
    if constexpr (!Dealt) packet = load<N>(from);
    for (unsigned t = 0; t < work.targets; ++t) {
      if constexpr (Dealt) packet = load<N>(from + t * work.in_stride);
      store<N>(work.out[t] + to, packet);
    }
  }
};

template <bool Dealt>
LOCKSTEP_KERNEL __launch_bounds__(threads_per_block)
    move_bytes(const __grid_constant__ Movement work) {
  sweep<16>(work.pass, Move<Dealt>{work, blockIdx.y});
}

}  // namespace lockstep::threads

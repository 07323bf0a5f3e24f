// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Rows of bfloat16 in the registers of a warp.

#include <cstddef>

#include "lockstep/lockstep.cuh"

namespace gpt2 {

using lockstep::BFloat16;

inline constexpr unsigned warp_size = 32;

/// What one instruction loads.
struct alignas(16) Packet {
  static constexpr unsigned size = 8;
  BFloat16 at[size];
};

/// Adds up a number of each lane, in an order that never changes.
inline __device__ float warp_sum(float value) {
  for (unsigned other = warp_size / 2; other > 0; other /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, other);
  return value;
}

/// A row of `Width` numbers, a part of it in each lane of a warp.
template <std::size_t Width>
struct Row {
  static_assert(Width % (warp_size * Packet::size) == 0,
                "gpt2: the width is a multiple of 256, which the lanes of a warp load");
  static constexpr unsigned packets = Width / (warp_size * Packet::size);

  float at[packets][Packet::size];

  static __device__ unsigned lane() { return threadIdx.x % warp_size; }
  /// Which element of the row `at[packet][i]` is.
  static __device__ unsigned place(unsigned packet, unsigned i) {
    return (packet * warp_size + lane()) * Packet::size + i;
  }

  __device__ void for_each(auto&& f) {
#pragma unroll
    for (unsigned p = 0; p < packets; ++p) {
#pragma unroll
      for (unsigned i = 0; i < Packet::size; ++i) f(at[p][i], p, i);
    }
  }
  static __device__ Row of(const BFloat16* row) {
    Row result;
#pragma unroll
    for (unsigned p = 0; p < packets; ++p) {
      const Packet packet = reinterpret_cast<const Packet*>(row)[p * warp_size + lane()];
#pragma unroll
      for (unsigned i = 0; i < Packet::size; ++i)
        result.at[p][i] = static_cast<float>(packet.at[i]);
    }
    return result;
  }
  __device__ void store(BFloat16* row) const {
#pragma unroll
    for (unsigned p = 0; p < packets; ++p) {
      Packet packet;
#pragma unroll
      for (unsigned i = 0; i < Packet::size; ++i) packet.at[i] = BFloat16(at[p][i]);
      reinterpret_cast<Packet*>(row)[p * warp_size + lane()] = packet;
    }
  }
  /// Rounds to what a reader of the stored row will see.
  __device__ void round() {
    for_each([](float& x, unsigned, unsigned) { x = static_cast<float>(BFloat16(x)); });
  }
  /// The sum of f(x, packet, i) over the whole row, in every lane.
  __device__ float sum(auto&& f) {
    float own = 0;
    for_each([&](float& x, unsigned p, unsigned i) { own += f(x, p, i); });
    return warp_sum(own);
  }
};

}  // namespace gpt2

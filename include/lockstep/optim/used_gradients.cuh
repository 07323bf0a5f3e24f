// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which parameters have a gradient that is not zero, found on the device.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cub/block/block_reduce.cuh>
#include <span>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/device/cuda/vector.cuh"
#include "lockstep/optim/norm.cuh"
#include "lockstep/optim/parameter_pieces.cuh"

namespace lockstep::detail {

/// Notes every parameter that has an element other than zero; NaN is one. With `Squares` it is the
/// norm's pass too.
template <class T, bool Squares>
struct UsedPass {
  static constexpr std::size_t several = static_cast<std::size_t>(-1);

  SquaresPass<T> squares;
  const ParameterPieces& where;
  std::uint8_t* used;     // by parameter
  std::size_t parameter;  // of the whole tile, or `several`

  template <std::size_t N>
  __device__ Packet<T, N> load(std::size_t at) const {
    return squares.template load<N>(at);
  }
  template <std::size_t N>
  __device__ void finish(std::size_t at, const Packet<T, N>& loaded) {
    if constexpr (Squares) squares.template finish<N>(at, loaded);
    bool any = false;
#pragma unroll
    for (std::size_t i = 0; i < N; ++i)
      any |= static_cast<Accumulator<T>>(loaded.at[i]) != Accumulator<T>{0};
    if (!any) return;
    const std::size_t p = parameter == several ? where.at(at)->group : parameter;
    if (__ldcg(used + p) == 0) __stcg(used + p, std::uint8_t{1});
  }
};

/// Blocks write nothing but ones, so their order does not matter. A tile of a parameter that is
/// known to be used is not read, unless its squares are wanted.
template <class T, bool Squares>
LOCKSTEP_KERNEL __launch_bounds__(SquaresShape::threads)
    find_used(const T* values, ParameterPieces where, std::uint8_t* used, double* partials,
              std::size_t count) {
  constexpr std::size_t packet = packet_size<T>;
  constexpr std::size_t length = SquaresShape::tile * packet;
  const std::size_t tiles = tiles_of<SquaresShape, packet>(count);
  UsedPass<T, Squares> pass{{values}, where, used, 0};
  for (std::size_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const std::size_t first = tile * length;
    const std::size_t last = (first + length < count ? first + length : count) - 1;
    const GroupPiece* const piece = where.at(first);
    const bool one = where.holds(piece, last);
    if constexpr (!Squares) {
      if (one && __ldcg(used + piece->group) != 0) continue;
    }
    pass.parameter = one ? piece->group : pass.several;
    sweep_tile<SquaresShape, packet>(pass, tile, count);
  }
  if constexpr (Squares) {
    using Reduce = cub::BlockReduce<double, SquaresShape::threads>;
    __shared__ typename Reduce::TempStorage storage;
    const double sum = Reduce(storage).Sum(pass.squares.sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
  }
}

/// Sets `used[p]` for every parameter with an element other than zero among `count` values, and
/// clears none. If `partials` are wanted, they are those of `launch_squares`, from the same pass.
/// **Stream** in its order. **Host** does not block.
template <class T>
void launch_find_used(cudaStream_t stream, const T* values, const ParameterPieces& where,
                      std::uint8_t* used, double* partials, std::size_t count) {
  if (count == 0) return;
  require_alignment("test for zero gradients", {values});
  const auto blocks = static_cast<unsigned>(square_partials<T>(count));
  if (partials != nullptr) {
    launch_kernel<find_used<T, true>>("squares and test for zero", stream, blocks,
                                      SquaresShape::threads, values, where, used, partials, count);
  } else {
    launch_kernel<find_used<T, false>>("test for zero", stream, blocks, SquaresShape::threads,
                                       values, where, used, partials, count);
  }
}

/// Flags of the host on their way to the device, as a kernel's argument.
struct FlagBits {
  static constexpr std::size_t most = 2048;
  std::uint32_t words[most / 32];
};

template <class Flag>
LOCKSTEP_KERNEL spread_flags(FlagBits bits, Flag* to, std::size_t count) {
  const std::size_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = static_cast<Flag>(bits.words[i / 32] >> (i % 32) & 1U);
}

/// Stores flags, each zero or one. They are part of the launch, so that a captured step keeps those
/// with which it was captured. **Stream** in its order. **Host** does not block.
inline void launch_store_flags(cudaStream_t stream, std::uint8_t* to,
                               std::span<const std::uint8_t> flags) {
  constexpr unsigned threads = 256;
  for (std::size_t first = 0; first < flags.size(); first += FlagBits::most) {
    const std::size_t count = std::min(flags.size() - first, FlagBits::most);
    FlagBits bits{};
    for (std::size_t i = 0; i != count; ++i)
      bits.words[i / 32] |= std::uint32_t{flags[first + i] != 0} << (i % 32);
    launch_kernel<spread_flags<std::uint8_t>>(
        "flags", stream, static_cast<unsigned>((count + threads - 1) / threads), threads, bits,
        to + first, count);
  }
}

}  // namespace lockstep::detail

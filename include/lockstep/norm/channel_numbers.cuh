// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What kernels of norms know of a channel, and how they turn a value into a normalised one.

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/norm/norm_work.hpp"

namespace lockstep::detail {

/// A mean and what deviations from it are multiplied by, of a channel or of a row. One load gets
/// both.
struct alignas(16) KeptNumbers {
  double mean;
  double inverse;  // 1 / the deviation
};

__device__ inline KeptNumbers load_kept(const KeptNumbers* kept) {
  const auto both = *reinterpret_cast<const double2*>(kept);
  return {both.x, both.y};
}

/// A mean in the arithmetic of elements. A float has 24 bits of it: that would be a deviation where
/// means are large. So it is a sum of two.
template <class A>
struct SplitMean {
  A high;
  A low;

  SplitMean() = default;
  __device__ explicit SplitMean(double mean)
      : high(static_cast<A>(mean)), low(static_cast<A>(mean - static_cast<double>(high))) {}
  __device__ A deviation(A value) const { return (value - high) - low; }
};

/// How a channel's values are normalised. Forward and backward call the same function, without a
/// choice for the compiler, so that backward finds the values that forward has rounded.
template <class A>
struct ChannelNumbers {
  SplitMean<A> mean;
  A scale;
  A shift;

  ChannelNumbers() = default;
  template <class W>
  __device__ ChannelNumbers(const KeptNumbers& kept, const NormAffine<W>& affine,
                            std::size_t channel)
      : mean(kept.mean),
        scale(static_cast<A>(
            static_cast<double>(static_cast<Accumulator<W>>(affine.weight[channel])) *
            kept.inverse)),
        shift(static_cast<A>(static_cast<Accumulator<W>>(affine.bias[channel]))) {}

  __device__ A normalised(A deviation) const { return std::fma(deviation, scale, shift); }
};

/// Does ReLU stop the gradient of this output? It lets NaN pass, as it does forward.
template <class T>
__device__ bool is_stopped(T output) {
  return static_cast<Accumulator<T>>(output) <= 0;
}

/// A number by which many others are divided: a product and a shift instead of a division.
struct FixedDivisor {
  std::uint64_t value;
  std::uint64_t magic;   // 2^64 / value, rounded up; 0 where that is not exact
  std::uint32_t narrow;  // 2^32 / value, likewise: one product of 32 bits is much cheaper

  /// For quotients of numbers up to `most` (Granlund, Montgomery: Division by Invariant Integers
  /// using Multiplication, 1994).
  FixedDivisor(std::uint64_t value, std::uint64_t most)
      : value(value == 0 ? 1 : value),
        magic(value > 1 && most <= ~std::uint64_t{0} / value ? ~std::uint64_t{0} / value + 1 : 0),
        narrow(value > 1 && most <= 0xffffffffu / value
                   ? static_cast<std::uint32_t>(0xffffffffu / value + 1)
                   : 0) {}

  __device__ std::uint64_t quotient(std::uint64_t number) const {
    if (narrow != 0) return (std::uint64_t{static_cast<std::uint32_t>(number)} * narrow) >> 32;
    if (magic == 0) return number / value;
#if defined(__CUDA_ARCH__)
    return __umul64hi(number, magic);
#else
    return static_cast<std::uint64_t>((static_cast<unsigned __int128>(number) * magic) >> 64);
#endif
  }
};

}  // namespace lockstep::detail

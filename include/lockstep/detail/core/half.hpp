// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The 16-bit floating-point types, with the layout of CUDA's `__half` and `__nv_bfloat16`.
/// Host and device round to the same bits; every NaN becomes 0x7fff, as in the GPU's instruction.

#include "lockstep/detail/core/standard.hpp"

namespace lockstep {

/// IEEE 754 binary16, for storage: arithmetic is in float and rounded once, to nearest even.
class Half {
 public:
  constexpr Half() = default;
  LOCKSTEP_HOST_DEVICE constexpr explicit Half(float value) : bits_(round(value)) {}
  LOCKSTEP_HOST_DEVICE constexpr explicit operator float() const { return widen(bits_); }

  LOCKSTEP_HOST_DEVICE constexpr std::uint16_t bits() const { return bits_; }

 private:
  /// A selection mask. g++ would turn a comparison into a branch.
  LOCKSTEP_HOST_DEVICE static constexpr std::uint32_t ones_if_negative(std::uint32_t number) {
    return static_cast<std::uint32_t>(static_cast<std::int32_t>(number) >> 31);
  }

  LOCKSTEP_HOST_DEVICE static constexpr std::uint16_t round(float value) {
#if defined(__CUDA_ARCH__)
    if (!__builtin_is_constant_evaluated()) {
      std::uint16_t bits = 0;
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
      return bits;
    }
#endif
    // All cases are computed and one is selected, so that compilers vectorise loops.
    const auto single = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t sign = (single >> 16) & 0x8000u;
    const std::uint32_t magnitude = single & 0x7fffffffu;
    // Normal: change the exponent's bias and round the 13 bits that are cut off. Values above 65536
    // are clamped to it: its result has the bits of infinity.
    const std::uint32_t large = magnitude < 0x47800000u ? magnitude : 0x47800000u;
    const std::uint32_t normal = (large - 0x38000000u + 0xfffu + ((large >> 13) & 1u)) >> 13;
    // Subnormal: adding 0.5 aligns the last bit with that of a subnormal half (2^-24), and rounds.
    const std::uint32_t is_small = ones_if_negative(magnitude - 0x38800000u);
    const std::uint32_t small = magnitude & is_small;
    const float aligned = __builtin_bit_cast(float, small) + 0.5f;
    const std::uint32_t subnormal = __builtin_bit_cast(std::uint32_t, aligned) - 0x3f000000u;
    const std::uint32_t rounded = sign | (subnormal & is_small) | (normal & ~is_small);
    const std::uint32_t is_nan = ones_if_negative(0x7f800000u - magnitude);
    return static_cast<std::uint16_t>((is_nan & 0x7fffu) | (rounded & ~is_nan));
  }

  LOCKSTEP_HOST_DEVICE static constexpr float widen(std::uint16_t bits) {
#if defined(__CUDA_ARCH__)
    if (!__builtin_is_constant_evaluated()) {
      float value = 0;
      asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
      return value;
    }
#endif
    const std::uint32_t sign = (bits & 0x8000u) << 16;
    const std::uint32_t exponent = bits & 0x7c00u;
    const std::uint32_t bias = exponent == 0x7c00u ? 0x70000000u : 0x38000000u;
    const std::uint32_t normal = ((bits & 0x7fffu) << 13) + bias;
    const float value = static_cast<float>(static_cast<std::int32_t>(bits & 0x03ffu)) * 0x1p-24f;
    const auto subnormal = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t is_small = ones_if_negative(exponent - 1u);
    return __builtin_bit_cast(float, sign | (subnormal & is_small) | (normal & ~is_small));
  }

  std::uint16_t bits_ = 0;
};

/// The upper half of a float, for storage like `Half`.
class BFloat16 {
 public:
  constexpr BFloat16() = default;
  LOCKSTEP_HOST_DEVICE constexpr explicit BFloat16(float value) : bits_(round(value)) {}
  LOCKSTEP_HOST_DEVICE constexpr explicit operator float() const {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits_) << 16);
  }

  LOCKSTEP_HOST_DEVICE constexpr std::uint16_t bits() const { return bits_; }

 private:
  LOCKSTEP_HOST_DEVICE static constexpr std::uint16_t round(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if (!__builtin_is_constant_evaluated()) {
      std::uint16_t bits = 0;
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
      return bits;
    }
#endif
    const auto single = __builtin_bit_cast(std::uint32_t, value);
    if ((single & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;  // NaN: rounding could lose it
    return static_cast<std::uint16_t>((single + 0x7fffu + ((single >> 16) & 1u)) >> 16);
  }

  std::uint16_t bits_ = 0;
};

static_assert(sizeof(Half) == 2 && sizeof(BFloat16) == 2);

}  // namespace lockstep

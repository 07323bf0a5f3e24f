// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Byte counts: `25_MiB`, alignment, and products that detect overflow.

#include <limits>

#include "lockstep/detail/core/standard.hpp"

namespace lockstep {

inline namespace literals {

constexpr std::size_t operator""_KiB(unsigned long long n) { return n << 10; }
constexpr std::size_t operator""_MiB(unsigned long long n) { return n << 20; }
constexpr std::size_t operator""_GiB(unsigned long long n) { return n << 30; }

}  // namespace literals

/// The alignment of tensors: cache lines, CUDA memory transactions and every vector register.
inline constexpr std::size_t arena_alignment = 256;

namespace detail {

/// Rounds up to a multiple of `alignment`, a power of two.
constexpr std::size_t align_up(std::size_t n, std::size_t alignment = arena_alignment) {
  return (n + alignment - 1) & ~(alignment - 1);
}

/// The result of `saturating_product` on overflow.
inline constexpr std::size_t too_large = std::numeric_limits<std::size_t>::max();

/// The largest arena: sums over optimizer states in wider types and over all ranks do not overflow.
inline constexpr std::size_t most_arena_bytes = std::size_t{1} << 56;

constexpr std::size_t saturating_product(std::size_t a, std::size_t b) {
  if (a == 0 || b == 0) return 0;
  return a > too_large / b ? too_large : a * b;
}

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Random numbers without a state: any number of a stream, in any order, on any platform.

#include <cstdint>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// The odd number nearest 2^64 divided by the golden ratio: its multiples spread evenly.
inline constexpr std::uint64_t golden_step = 0x9e3779b97f4a7c15u;

/// SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection under which every bit of the
/// result depends on every bit of x.
LOCKSTEP_HOST_DEVICE constexpr std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Number i of a SplitMix64 that starts from `stream`.
LOCKSTEP_HOST_DEVICE constexpr std::uint64_t random_at(std::uint64_t stream, std::uint64_t i) {
  return mix_bits(stream + (i + 1) * golden_step);
}

}  // namespace lockstep::detail

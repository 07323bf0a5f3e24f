// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Constexpr 64-bit functions: stateless random numbers, and a hash of names and jobs.

#include "lockstep/detail/core/standard.hpp"

namespace lockstep::detail {

/// The odd number nearest to 2^64 divided by the golden ratio: its multiples spread evenly.
inline constexpr std::uint64_t golden_step = 0x9e3779b97f4a7c15u;

/// SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection that mixes every bit into all.
LOCKSTEP_HOST_DEVICE constexpr std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Number i of the SplitMix64 sequence that starts from `stream`.
LOCKSTEP_HOST_DEVICE constexpr std::uint64_t random_at(std::uint64_t stream, std::uint64_t i) {
  return mix_bits(stream + (i + 1) * golden_step);
}

/// FNV-1a (Fowler, Noll, Vo), of names and numbers only, so that programs of all compilers agree.
class Hash {
 public:
  constexpr Hash& text(std::string_view text) {
    for (char c : text) byte(static_cast<unsigned char>(c));
    return number(text.size());  // "ab","c" and "a","bc" differ
  }

  constexpr Hash& number(std::uint64_t n) {
    for (int shift = 0; shift < 64; shift += 8) byte(static_cast<unsigned char>(n >> shift));
    return *this;
  }

  constexpr std::uint64_t value() const { return state_; }

 private:
  constexpr void byte(unsigned char b) { state_ = (state_ ^ b) * 0x100000001b3u; }

  std::uint64_t state_ = 0xcbf29ce484222325u;
};

constexpr std::uint64_t hash_of(std::string_view text) { return Hash{}.text(text).value(); }

}  // namespace lockstep::detail

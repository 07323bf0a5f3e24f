// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file 64-bit functions: stateless random numbers, a hash of names and jobs, both constexpr, and
/// a checksum for files, computed at the speed of memory.

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

/// Eight lanes consume the data's 64-bit words in turn, two per step. Steps, and the joining of
/// lanes, are bijections: data that differ within one word never have the same checksum, others
/// hardly ever. Not cryptographic; the same on every machine and for any division into calls.
class Checksum {
 public:
  Checksum& add(std::span<const std::byte> bytes);
  Checksum& add(std::string_view bytes) { return add(std::as_bytes(std::span(bytes))); }

  std::uint64_t value() const;

 private:
  static constexpr std::size_t lane_count = 8;
  static constexpr std::size_t block_bytes = 16 * lane_count;
  using Lanes = std::array<std::uint64_t, lane_count>;

  static void add_block(Lanes& lanes, const std::byte* block);

  Lanes lanes_{random_at(0, 0), random_at(0, 1), random_at(0, 2), random_at(0, 3),
               random_at(0, 4), random_at(0, 5), random_at(0, 6), random_at(0, 7)};
  std::array<std::byte, block_bytes> rest_{};  // the bytes after the last whole block
  std::uint64_t length_ = 0;
};

/// As in files: 16 hexadecimal digits.
std::string checksum_text(std::uint64_t checksum);

/// Empty where `text` is no checksum.
std::optional<std::uint64_t> checksum_from(std::string_view text);

}  // namespace lockstep::detail

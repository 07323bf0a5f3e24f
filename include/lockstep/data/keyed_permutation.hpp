// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A permutation that needs no memory: any element of it, in constant time.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "lockstep/core/error.hpp"
#include "lockstep/core/hash.hpp"

namespace lockstep::detail {

/// A bijection of 0 .. size-1 chosen by a key: a Feistel network over the smallest power of two
/// that holds them, walked until it lands inside (Black and Rogaway, 2002), which takes fewer than
/// two turns on average. Integers only: the same on every platform, for up to 2^63 items.
///
/// Eight rounds of a 64-bit mixer over at least eight bits. Four make such a network pseudorandom
/// when its halves are wide (Luby and Rackoff); when they are narrow, more may not: with four bits,
/// the orders of five items are unequal after any number of rounds. With eight, chi-square over all
/// orders of 3 to 7 items finds nothing. It is a shuffle, not a cipher.
class KeyedPermutation {
 public:
  static constexpr std::size_t rounds = 8;
  static constexpr std::size_t least_bits = 8;

  constexpr KeyedPermutation() = default;

  constexpr KeyedPermutation(std::size_t size, std::uint64_t key) : size_(size) {
    if (size > std::size_t{1} << 63)
      throw Error("KeyedPermutation", "more than 2^63 items", "split the data set");
    const auto bits = std::max<std::size_t>(least_bits, size == 0 ? 0 : std::bit_width(size - 1));
    low_bits_ = bits / 2;
    low_mask_ = (std::uint64_t{1} << low_bits_) - 1;
    high_mask_ = (std::uint64_t{1} << (bits - low_bits_)) - 1;
    for (std::size_t round = 0; round != rounds; ++round) keys_[round] = random_at(key, round);
  }

  constexpr std::size_t size() const { return size_; }

  /// Where item i goes, for i < size().
  constexpr std::size_t operator[](std::size_t i) const { return at(i, 0); }

  /// The same in another permutation, one for each tweak: for many of one size, it costs less than
  /// to make each by its key. Tweaks should be random numbers.
  constexpr std::size_t at(std::size_t i, std::uint64_t tweak) const {
    do i = encrypt(i, tweak);
    while (i >= size_);
    return i;
  }

 private:
  /// Each half is changed by the other in turn, so they may differ in width.
  constexpr std::uint64_t encrypt(std::uint64_t x, std::uint64_t tweak) const {
    std::uint64_t low = x & low_mask_;
    std::uint64_t high = x >> low_bits_;
    for (std::size_t round = 0; round != rounds; round += 2) {
      high ^= mix_bits(low ^ keys_[round] ^ tweak) & high_mask_;
      low ^= mix_bits(high ^ keys_[round + 1] ^ tweak) & low_mask_;
    }
    return high << low_bits_ | low;
  }

  std::size_t size_ = 0;
  std::size_t low_bits_ = 0;
  std::uint64_t low_mask_ = 0;
  std::uint64_t high_mask_ = 0;
  std::array<std::uint64_t, rounds> keys_{};
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Permutations: PyTorch's `randperm` on the CPU, number for number, and keyed ones that need
/// no memory.

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/core/hash.hpp"

namespace lockstep::detail {

/// Matsumoto and Nishimura's MT19937. The same draws as `std::mt19937(seed)`, 624 per call.
class MersenneTwister {
 public:
  static constexpr std::size_t block_size = 624;
  using Block = std::array<std::uint32_t, block_size>;

  explicit constexpr MersenneTwister(std::uint32_t seed) {
    state_[0] = seed;
    for (std::uint32_t i = 1; i != block_size; ++i)
      state_[i] = 1812433253u * (state_[i - 1] ^ (state_[i - 1] >> 30)) + i;
  }

  /// The next 624 draws.
  constexpr void draw(Block& draws) {
    constexpr std::size_t ahead = 397;
    constexpr std::size_t behind = block_size - ahead;
    std::uint32_t* const s = state_.data();
    for (std::size_t i = 0; i != behind; ++i) s[i] = s[i + ahead] ^ twist(s[i], s[i + 1]);
    for (std::size_t i = behind; i != block_size - 1; ++i)
      s[i] = s[i - behind] ^ twist(s[i], s[i + 1]);
    s[block_size - 1] = s[ahead - 1] ^ twist(s[block_size - 1], s[0]);
    for (std::size_t i = 0; i != block_size; ++i) draws[i] = temper(s[i]);
  }

 private:
  static constexpr std::uint32_t twist(std::uint32_t high, std::uint32_t low) {
    const std::uint32_t joined = (high & 0x80000000u) | (low & 0x7fffffffu);
    return (joined >> 1) ^ ((0u - (low & 1u)) & 0x9908b0dfu);
  }

  static constexpr std::uint32_t temper(std::uint32_t y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
  }

  std::array<std::uint32_t, block_size> state_{};
};

/// From this many items on PyTorch draws 64 bits, because 32 would favour small numbers.
inline constexpr std::size_t wide_draws_from = std::numeric_limits<std::uint32_t>::max() / 20;

/// Replaces the k-th draw of a block by `draw % (left - k) + k`, the distance of the k-th swap from
/// the first of `left` items. The quotient of two 32-bit integers, rounded to 53 bits, never
/// reaches the next integer, so doubles are exact; and unlike integers they divide in vectors.
/// Returns the number of items of the block.
inline std::uint32_t find_targets(MersenneTwister::Block& draws, std::uint32_t left) {
  const std::uint32_t count = std::min<std::uint32_t>(MersenneTwister::block_size, left);
  for (std::uint32_t k = 0; k != count; ++k) {
    const std::uint32_t choices = left - k;
    const auto quotient = static_cast<std::uint32_t>(static_cast<double>(draws[k]) / choices);
    draws[k] += k - quotient * choices;
  }
  return count;
}

/// Fisher and Yates, forwards: swaps item i with one of those from i on. Draws do not depend on the
/// items, so the memory that the next block needs is prefetched while one is swapped.
template <std::unsigned_integral Index>
void shuffle_with_narrow_draws(std::span<Index> items, std::uint32_t seed) {
  std::iota(items.begin(), items.end(), Index{0});
  MersenneTwister generator(seed);
  MersenneTwister::Block targets;
  MersenneTwister::Block next_targets;
  auto left = static_cast<std::uint32_t>(items.size());
  generator.draw(targets);
  std::uint32_t count = find_targets(targets, left);
  for (Index* first = items.data(); left != 0;) {
    left -= count;
    generator.draw(next_targets);
    const std::uint32_t next_count = find_targets(next_targets, left);
    for (std::uint32_t k = 0; k != count; ++k) {
      if (k < next_count) __builtin_prefetch(first + count + next_targets[k], 1);
      std::swap(first[k], first[targets[k]]);
    }
    first += count;
    count = next_count;
    targets = next_targets;
  }
}

/// Fisher and Yates, inside out: item i is appended to the first i, then swapped with one of them.
template <std::unsigned_integral Index>
void shuffle_with_wide_draws(std::span<Index> items, std::uint32_t seed) {
  MersenneTwister generator(seed);
  MersenneTwister::Block draws;
  constexpr std::size_t pairs = MersenneTwister::block_size / 2;
  for (std::size_t begin = 0; begin < items.size(); begin += pairs) {
    generator.draw(draws);
    const std::size_t count = std::min(pairs, items.size() - begin);
    for (std::size_t k = 0; k != count; ++k) {
      const std::size_t i = begin + k;
      const std::uint64_t draw = std::uint64_t{draws[2 * k]} << 32 | draws[2 * k + 1];
      const std::size_t target = draw % (i + 1);
      items[i] = static_cast<Index>(i);
      items[i] = std::exchange(items[target], static_cast<Index>(i));
    }
  }
}

/// Fills `items` as `torch.randperm(items.size())` does after `torch.manual_seed(seed)`.
template <std::unsigned_integral Index>
void torch_permutation(std::span<Index> items, std::uint64_t seed) {
  const auto low_bits = static_cast<std::uint32_t>(seed);  // PyTorch's generator takes no more
  if (items.size() < wide_draws_from) {
    shuffle_with_narrow_draws(items, low_bits);
  } else {
    shuffle_with_wide_draws(items, low_bits);
  }
}

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

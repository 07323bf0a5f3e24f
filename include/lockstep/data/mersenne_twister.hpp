// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The numbers of std::mt19937, a block at a time, in loops that compilers vectorise.

#include <array>
#include <cstddef>
#include <cstdint>

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

}  // namespace lockstep::detail

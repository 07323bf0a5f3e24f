// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file PyTorch's `randperm` on the CPU, number for number.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <utility>

#include "lockstep/data/mersenne_twister.hpp"

namespace lockstep::detail {

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

}  // namespace lockstep::detail

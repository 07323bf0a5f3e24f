// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Join flags: a few elements behind the first bucket that travel with it and say which ranks
/// still have batches, so that no call of their own is needed for it.

#include <cstddef>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// A rank adds one bit of its flag. The sum of a flag's four bits is at most 15: exact in every
/// type, and an average over thousands of ranks is still nearest to the right one.
inline constexpr std::size_t ranks_per_flag = 4;
/// The most ranks of a job whose number the compiler does not know.
inline constexpr std::size_t most_joining_ranks = 4096;

/// How many flags a world of so many ranks has.
constexpr std::size_t join_flags_for(std::size_t ranks) {
  return ((ranks == dynamic ? most_joining_ranks : ranks) + ranks_per_flag - 1) / ranks_per_flag;
}

/// The ranks that had batches in a round: how many, and the lowest of them. A round without any
/// leaves the lowest as it was.
struct LiveRanks {
  std::size_t count = 0;
  std::size_t lowest = 0;
};

/// Flag `index`, as a rank sends it.
template <class T>
LOCKSTEP_HOST_DEVICE constexpr T join_flag(std::size_t index, std::size_t rank, bool is_live) {
  using A = Accumulator<T>;
  const bool is_own = is_live && index == rank / ranks_per_flag;
  return static_cast<T>(is_own ? static_cast<A>(1u << rank % ranks_per_flag) : A{0});
}

/// Reads reduced flags. They are sums over ranks once they are multiplied by `scale`.
template <class T>
LOCKSTEP_HOST_DEVICE constexpr LiveRanks read_join_flags(const T* flags, std::size_t count,
                                                     double scale, std::size_t lowest_before) {
  using A = Accumulator<T>;
  LiveRanks live{0, lowest_before};
  for (std::size_t i = 0; i != count; ++i) {
    const double sum = static_cast<double>(static_cast<A>(flags[i])) * scale;
    // NOLINTNEXTLINE(bugprone-incorrect-roundings): never negative, and lround is no constant
    const auto bits = static_cast<unsigned>(sum + 0.5);
    for (std::size_t k = 0; k != ranks_per_flag; ++k) {
      if ((bits >> k & 1u) == 0) continue;
      if (live.count++ == 0) live.lowest = i * ranks_per_flag + k;
    }
  }
  return live;
}

}  // namespace lockstep::detail

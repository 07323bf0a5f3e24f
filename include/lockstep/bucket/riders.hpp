// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Riders: a few elements behind the first bucket that travel with it and say which ranks
/// still have batches, so that no call of their own is needed for it.

#include <cstddef>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// A rank adds one bit of its rider. The sum of a rider's four bits is at most 15: exact in every
/// type, and an average over thousands of ranks is still nearest to the right one.
inline constexpr std::size_t ranks_per_rider = 4;
/// The most ranks of a job whose number the compiler does not know.
inline constexpr std::size_t most_joining_ranks = 4096;

/// How many riders a world of so many ranks has.
constexpr std::size_t riders_for(std::size_t ranks) {
  return ((ranks == dynamic ? most_joining_ranks : ranks) + ranks_per_rider - 1) / ranks_per_rider;
}

/// The ranks that had batches in a round: how many, and the lowest of them. A round without any
/// leaves the lowest as it was.
struct LiveRanks {
  std::size_t count = 0;
  std::size_t lowest = 0;
};

/// Rider `at`, as a rank sends it.
template <class T>
LOCKSTEP_HOST_DEVICE constexpr T rider_of(std::size_t at, std::size_t rank, bool is_live) {
  using A = Accumulator<T>;
  const bool is_own = is_live && at == rank / ranks_per_rider;
  return static_cast<T>(is_own ? static_cast<A>(1u << rank % ranks_per_rider) : A{0});
}

/// Reads reduced riders. They are sums over ranks once they are multiplied by `scale`.
template <class T>
LOCKSTEP_HOST_DEVICE constexpr LiveRanks read_riders(const T* riders, std::size_t count,
                                                     double scale, std::size_t lowest_before) {
  using A = Accumulator<T>;
  LiveRanks live{0, lowest_before};
  for (std::size_t at = 0; at != count; ++at) {
    const double sum = static_cast<double>(static_cast<A>(riders[at])) * scale;
    // NOLINTNEXTLINE(bugprone-incorrect-roundings): never negative, and lround is no constant
    const auto bits = static_cast<unsigned>(sum + 0.5);
    for (std::size_t k = 0; k != ranks_per_rider; ++k) {
      if ((bits >> k & 1u) == 0) continue;
      if (live.count++ == 0) live.lowest = at * ranks_per_rider + k;
    }
  }
  return live;
}

}  // namespace lockstep::detail

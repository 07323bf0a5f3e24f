// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Who still has batches, as a replica knows it: told to all ranks with the first bucket.

#include <cstddef>
#include <span>
#include <string>
#include <type_traits>

#include "lockstep/bucket/riders.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/device.hpp"

namespace lockstep::detail {

/// How many riders travel behind a bucket.
template <class Traits>
constexpr std::size_t riders_behind([[maybe_unused]] std::size_t bucket,
                                    [[maybe_unused]] WorldSize world) {
  if constexpr (Traits::joins) return bucket == 0 ? riders_for(world.value()) : 0;
  return 0;
}

/// Throws if a job whose number of ranks the compiler does not know has more than its plan has
/// riders for.
template <class Traits>
void require_riders(WorldSize world, Rank rank) {
  if (riders_for(world.value()) <= Traits::riders) return;
  throw Error("UnevenInputs<Join>",
              "the job has " + std::to_string(world.value()) + " ranks, and World<dynamic> has " +
                  "room for " + std::to_string(most_joining_ranks),
              "write World<N> with the number of ranks", rank);
}

/// The riders of a replica on a device. `board` writes those that this rank sends, before the first
/// bucket travels; `settle` reads what has come, after it has landed; `live` is the answer.
/// Specialised for every device: `Cpu` here, `Cuda` in riders.cuh.
template <class Device, class Traits, class Comm>
class Riders;

template <class Traits, class Comm>
class Riders<Cpu, Traits, Comm> {
 public:
  explicit Riders(Comm& comm) : rank_(comm.rank()) {
    require_riders<Traits>(comm.world_size(), rank_);
  }

  template <class T>
  void board(std::span<T> riders, bool is_live) {
    for (std::size_t at = 0; at != riders.size(); ++at)
      riders[at] = rider_of<T>(at, rank_.value(), is_live);
  }
  template <class T>
  void settle(std::span<T> riders, double scale) {
    live_ = read_riders(riders.data(), riders.size(), scale, live_.lowest);
  }
  /// The ranks of the latest round that was settled.
  const LiveRanks& live() const { return live_; }
  /// No round has been since `lowest` was the lowest live rank.
  void begin_anew(std::size_t lowest = 0) { live_ = {0, lowest}; }

 private:
  Rank rank_;
  LiveRanks live_;
};

/// Ranks that have the same number of batches need no riders.
struct NoRiders {
  constexpr explicit NoRiders(auto&) {}
};

template <class Traits, class Comm>
using RidersOf =
    typename std::conditional_t<Traits::joins,
                                std::type_identity<Riders<typename Traits::device, Traits, Comm>>,
                                std::type_identity<NoRiders>>::type;

}  // namespace lockstep::detail

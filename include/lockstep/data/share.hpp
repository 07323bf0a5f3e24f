// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which places of an epoch's order belong to a rank: every W-th, from the rank on.

#include <cstddef>
#include <type_traits>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/sampler.hpp"

namespace lockstep::detail {

/// A rank's share of the places [first, n) of an epoch's order; `first` is not 0 where another
/// world has begun the epoch. Its k-th draw is the sample at place `(first + r + k*W) mod n`; the
/// remainder policy says how many draws there are, and which of them count. Where padding exceeds
/// the data set (n=3, W=8) the order is repeated as often as it takes.
template <class Remainder>
class Share {
 public:
  constexpr Share(std::size_t samples, WorldSize world, Rank rank, std::size_t first = 0)
      : samples_(samples), world_(world.value()), rank_(rank.value()), first_(first) {
    if (rank_ >= world_)
      detail::fail("DistributedSampler", {"rank ", rank_, " of a world of ", world_},
                   "ranks count from 0 and are below the world size");
  }

  constexpr std::size_t samples() const { return samples_; }
  constexpr WorldSize world() const { return WorldSize{world_}; }
  constexpr Rank rank() const { return Rank{rank_}; }
  constexpr std::size_t first() const { return first_; }

  /// The number of draws of the rank that has most.
  constexpr std::size_t longest() const {
    if constexpr (std::is_same_v<Remainder, DropLast>) return shared() / world_;
    return shared() / world_ + (shared() % world_ != 0);
  }

  /// The number of draws of this rank.
  constexpr std::size_t size() const {
    if constexpr (std::is_same_v<Remainder, Exact>)
      return shared() / world_ + (rank_ < shared() % world_);
    return longest();
  }

  /// The place of draw k in the order of the epoch.
  constexpr std::size_t place(std::size_t k) const {
    const std::size_t at = first_ + rank_ + k * world_;
    return at < samples_ ? at : at % samples_;
  }

  /// The weight of draw k: 0 for the duplicates that `Masked` adds, else 1.
  constexpr float weight(std::size_t k) const {
    if constexpr (std::is_same_v<Remainder, Masked>)
      return first_ + rank_ + k * world_ < samples_ ? 1.f : 0.f;
    return 1.f;
  }

  /// How many places are over when every rank has made `draws` draws. An epoch that is over is over
  /// in any world, also where `DropLast` has left places out.
  constexpr std::size_t over(std::size_t draws) const {
    if (draws >= longest()) return samples_;
    return first_ + draws * world_;
  }

 private:
  constexpr std::size_t shared() const { return samples_ - first_; }

  std::size_t samples_;
  std::size_t world_;
  std::size_t rank_;
  std::size_t first_;
};

}  // namespace lockstep::detail

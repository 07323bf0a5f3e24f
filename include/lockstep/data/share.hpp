// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which places of an epoch's order belong to a rank: every W-th, from the rank on.

#include <cstddef>
#include <type_traits>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/sampler.hpp"

namespace lockstep::detail {

/// A rank's share of n samples. Its k-th draw is the sample at place `(r + k*W) mod n`; the
/// remainder policy says how many draws there are, and which of them count. Where padding exceeds
/// the data set (n=3, W=8) the order is repeated as often as it takes.
template <class Remainder>
class Share {
 public:
  constexpr Share(std::size_t samples, WorldSize world, Rank rank)
      : samples_(samples), world_(world.value()), rank_(rank.value()) {
    if (rank_ >= world_)
      detail::fail("DistributedSampler", {"rank ", rank_, " of a world of ", world_},
                   "ranks count from 0 and are below the world size");
  }

  constexpr std::size_t samples() const { return samples_; }
  constexpr WorldSize world() const { return WorldSize{world_}; }
  constexpr Rank rank() const { return Rank{rank_}; }

  /// The number of draws of the rank that has most.
  constexpr std::size_t longest() const {
    if constexpr (std::is_same_v<Remainder, DropLast>) return samples_ / world_;
    return samples_ / world_ + (samples_ % world_ != 0);
  }

  /// The number of draws of this rank.
  constexpr std::size_t size() const {
    if constexpr (std::is_same_v<Remainder, Exact>)
      return samples_ / world_ + (rank_ < samples_ % world_);
    return longest();
  }

  /// The place of draw k in the order of the epoch.
  constexpr std::size_t place(std::size_t k) const {
    const std::size_t at = rank_ + k * world_;
    return at < samples_ ? at : at % samples_;
  }

  /// The weight of draw k: 0 for the duplicates that `Masked` adds, else 1.
  constexpr float weight(std::size_t k) const {
    if constexpr (std::is_same_v<Remainder, Masked>)
      return rank_ + k * world_ < samples_ ? 1.f : 0.f;
    return 1.f;
  }

 private:
  std::size_t samples_;
  std::size_t world_;
  std::size_t rank_;
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A job's position in its data, which a checkpoint keeps and a resumed job compares.

#include <cstddef>
#include <cstdint>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep {

/// Where an epoch is: what `state()` of samplers and loaders gives, and `resume` takes. The state
/// is the same on every rank, so that one rank's restores all. Ranks draw places of the epoch's
/// order in turn, so after `position` draws of each of `world` ranks, exactly the places up to
/// `first + position * world` are over: that is all that another world has to know.
struct SamplerState {
  std::size_t samples = 0;
  WorldSize world;
  Seed seed;
  std::uint64_t rule = 0;  ///< a hash of remainder and order
  Epoch epoch;
  std::size_t first = 0;     ///< places of the epoch that were over when this world began it
  std::size_t position = 0;  ///< draws of each rank of this world that are over

  friend bool operator==(const SamplerState&, const SamplerState&) = default;
};

namespace detail {

/// Throws unless a sampler in state `own` draws in the same order as one in state `saved`, with any
/// number of ranks.
inline void require_same_draws(const SamplerState& own, const SamplerState& saved) {
  const auto require = [](std::uint64_t here, std::uint64_t there, const char* what,
                          const char* advice) {
    if (here == there) return;
    fail("DistributedSampler",
         {"the saved state has ", what, " ", there, ", this sampler has ", here}, advice);
  };
  require(own.samples, saved.samples, "sample count", "resume with the same data set");
  require(own.seed.value(), saved.seed.value(), "seed", "resume with the same seed");
  if (own.rule != saved.rule) {
    fail("DistributedSampler", {"the saved state was drawn by another rule"},
         "resume with the same remainder policy, order and shuffle option");
  }
}

}  // namespace detail

}  // namespace lockstep

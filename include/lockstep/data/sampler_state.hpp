// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A job's position in its data, which a checkpoint keeps and a resumed job compares.

#include <cstddef>
#include <cstdint>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

/// The state is the same on every rank, so that one rank's restores all.
struct SamplerState {
  std::size_t samples = 0;
  WorldSize world;
  Seed seed;
  std::uint64_t rule = 0;  ///< a hash of remainder and order
  Epoch epoch;
  std::size_t position = 0;  ///< draws of the epoch that are over

  friend bool operator==(const SamplerState&, const SamplerState&) = default;
};

/// Throws unless a sampler in state `own` draws the same samples as one in state `saved`.
inline void require_same_draws(const SamplerState& own, const SamplerState& saved) {
  const auto require = [](std::uint64_t here, std::uint64_t there, const char* what,
                          const char* advice) {
    if (here == there) return;
    detail::fail("DistributedSampler",
                 {"the saved state has ", what, " ", there, ", this sampler has ", here}, advice);
  };
  require(own.samples, saved.samples, "sample count", "resume with the same data set");
  require(own.world.value(), saved.world.value(), "world size",
          "resume with as many ranks, or begin an epoch with set_epoch");
  require(own.seed.value(), saved.seed.value(), "seed", "resume with the same seed");
  if (own.rule != saved.rule) {
    detail::fail("DistributedSampler", {"the saved state was drawn by another rule"},
                 "resume with the same remainder policy, order and shuffle option");
  }
}

}  // namespace lockstep::detail

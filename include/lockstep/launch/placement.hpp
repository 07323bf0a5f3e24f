// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A process's place in a job as its launcher describes it, before it has met the others.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

struct RankPlacement {
  /// The launcher's name for messages: "torchrun", "Slurm".
  std::string launcher;
  Rank rank;
  WorldSize world;
  /// A local world of 0 is not known yet; the ranks then find out through the store.
  std::size_t local_rank = 0;
  std::size_t local_world = 0;
  /// Where the store is, or will be once rank 0 has opened it at the first of `ports` that is free.
  std::string host = "127.0.0.1";
  std::vector<std::uint16_t> ports;
  /// Does the launcher serve the store? Otherwise rank 0 does.
  bool hosted = false;
  /// How many ranks are threads of this process.
  std::size_t threads = 1;
  /// Empty until the ranks have agreed on one.
  std::string job;
  /// The secret itself, or the pipe from which to read it.
  std::string secret;
  int secret_fd = -1;
  /// The pipe through which the launcher wants to hear of a failure.
  int report_fd = -1;
};

/// Throws if the numbers do not fit together, before any rank waits for another.
inline void check_placement(const RankPlacement& place) {
  if (place.world.value() == 0) {
    fail("launch", {place.launcher, " gives a world of zero ranks"}, "a job has at least one rank");
  }
  if (place.rank >= Rank{place.world.value()}) {
    fail("launch", {place.launcher, " gives rank ", place.rank, " of a world of ", place.world},
         "ranks count from 0 and stay below the world size");
  }
  if (place.local_world > place.world.value() ||
      (place.local_world > 0 && place.local_rank >= place.local_world)) {
    fail("launch",
         {place.launcher, " gives local rank ", place.local_rank, " of ", place.local_world,
          " in a world of ", place.world},
         "local ranks count from 0 and stay below the number of ranks on the host");
  }
}

/// Ports for ranks that can agree on a text but not on a free port: eight, out of a range that
/// systems do not hand out by themselves. Rank 0 takes the first that is free; the others try them
/// in turn until one has a store that knows the job's secret.
inline std::vector<std::uint16_t> derived_ports(std::string_view job) {
  constexpr std::uint64_t begin = 20000;
  constexpr std::uint64_t count = 12000;
  const std::uint64_t start = hash_of(job) % count;
  std::vector<std::uint16_t> ports;
  ports.reserve(8);
  for (std::uint64_t i = 0; i < 8; ++i) {
    ports.push_back(static_cast<std::uint16_t>(begin + (start + i * 1543) % count));
  }
  return ports;
}

/// A secret for ranks that were given none. It keeps jobs apart, but not strangers who can guess
/// the job's id; `given`, LOCKSTEP_SECRET, does that. The host's address is left out: ranks may
/// rightly know rank 0's host by different names.
inline std::string derived_secret(std::string_view job, std::uint16_t port,
                                  std::string_view given) {
  return text({"job ", job.size(), ":", job, " port ", port, " secret ", given});
}

}  // namespace lockstep::detail

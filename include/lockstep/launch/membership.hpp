// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What one rank knows about its job once it has been launched.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/core/strong.hpp"

namespace lockstep {

/// How long ranks wait for each other unless they are told otherwise.
inline constexpr std::chrono::milliseconds default_timeout{300'000};

/// What a rank knows of its job: its own number, the world, and where the store is.
struct Membership {
  Rank rank;
  WorldSize world;
  /// This rank's place among the ranks of its host, and how many those are.
  std::size_t local_rank = 0;
  std::size_t local_world = 1;
  /// Where the job's store listens.
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;
  /// Different for every job, the same on all its ranks, fit for a file name: what keeps the shared
  /// memory of two jobs on one host apart.
  std::string job;
  /// What the store asks of whoever connects.
  std::string secret;
  /// For rendezvous, and for collectives that are given no other limit.
  std::chrono::milliseconds timeout{default_timeout};
  /// How many of the job's ranks are threads of this process, neighbours by number.
  std::size_t process_ranks = 1;
};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A rank's knowledge of its job once it has been launched.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/core/strong.hpp"

namespace lockstep {

/// How long ranks wait for each other unless they are told otherwise.
inline constexpr std::chrono::milliseconds default_timeout{300'000};

/// A rank's place in its job: its number, the world, and where the store is.
struct Membership {
  Rank rank;
  WorldSize world;
  /// This rank's place among the ranks of its host, and how many those are.
  std::size_t local_rank = 0;
  std::size_t local_world = 1;
  /// Where the job's store listens.
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;
  /// The job's id, which keeps jobs on one host apart. It can be part of a file name.
  std::string job;
  /// The secret that a client of the store must know.
  std::string secret;
  /// The time limit of rendezvous, and of collectives without another limit.
  std::chrono::milliseconds timeout{default_timeout};
  /// How many of the job's ranks are threads of this process, neighbours by number.
  std::size_t process_ranks = 1;
};

}  // namespace lockstep

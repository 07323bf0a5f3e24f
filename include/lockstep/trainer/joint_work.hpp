// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Work of which all ranks learn how it ended: files are opened and written by single ranks,
/// and what goes wrong on one is the same error on all.

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/utility.hpp"

namespace lockstep::detail {

/// The ranks of a job, without the type of their communicator.
struct JointRanks {
  Rank rank;
  std::size_t world = 1;
  /// Every rank's text, by rank. Any thread may call it, one at a time. **Ranks** all. **Host**
  /// blocks.
  FunctionRef<std::vector<std::string>(std::string)> gather;
};

/// What every rank's `work()` returned, by rank. Where it throws on any rank, all ranks throw the
/// first such rank's error, with its number; no rank is told to end, so that the program may go
/// on. `work` must not communicate. **Ranks** all. **Host** blocks.
std::vector<std::string> work_together(const JointRanks& ranks, std::string_view operation,
                                       FunctionRef<std::string()> work);

/// How long ranks wait for each other's storage.
struct StoragePatience {
  /// How often a rank that works says that it is alive: below every sensible limit of calls.
  std::chrono::milliseconds heartbeat{200};
  /// After how long it says on stderr that its storage is slow; then after twice as long, and so
  /// on.
  std::chrono::milliseconds words = std::chrono::seconds(10);
  /// After how long without any progress its storage is taken for dead.
  std::chrono::milliseconds longest = std::chrono::minutes(30);
};

/// The same for work that waits for storage, which may take longer than a call between ranks may:
/// until all are done, a thread of every rank tells the others now and then that it is alive. So a
/// slow disk is no failure, and a process that ends or hangs is found as in every other call. A
/// rank that has read and written nothing for `patience.longest` is an error on all ranks.
///
/// `work` runs on the calling thread. **Ranks** all. **Host** blocks.
std::vector<std::string> store_together(const JointRanks& ranks, std::string_view operation,
                                        FunctionRef<std::string()> work,
                                        const StoragePatience& patience = {});

/// Throws on all ranks unless they were given the same path; `paths` are those of all ranks.
void require_same_path(const JointRanks& ranks, std::string_view operation,
                       const std::vector<std::string>& paths);

/// Appends a text with its length, and takes it off again.
void append_sized(std::string& out, std::string_view piece);
std::string_view take_sized(std::string_view& rest);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/trainer/joint_work.ipp"
#endif

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Lets one process of a host stage something while others wait, who see how far it is.

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/core/file.hpp"
#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// An flock on a file in which its owner writes who it is and how much it has copied. The system
/// frees the lock of a process that is dead, so the next one begins at once.
class StageLock {
 public:
  struct Waiting {
    /// For how long the owner may have nothing new to tell.
    std::chrono::milliseconds patience;
    /// When, and then how often, a line on stderr says for whom this process waits.
    std::chrono::milliseconds first_line = std::chrono::seconds(5);
    std::chrono::milliseconds next_lines = std::chrono::minutes(1);
  };

  /// Waits for the lock in the file `path`. `what` is what is staged.
  StageLock(std::string_view operation, const std::string& path, std::string_view what,
            const Waiting& waiting);
  ~StageLock();
  StageLock(const StageLock&) = delete;
  StageLock& operator=(const StageLock&) = delete;

  /// Tells those who wait, at most a few times a second.
  void progress(std::uint64_t bytes, std::uint64_t all);

 private:
  void say(std::string_view done);

  Descriptor file_;
  std::string owner_;
  std::chrono::steady_clock::time_point said_{};
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/stage_lock.ipp"
#endif

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Copies data from slow or shared storage to a disk of the host, once for all its ranks.

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/core/file.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/utility.hpp"

namespace lockstep {

/// How `stage_locally` trusts and waits.
struct StageOptions {
  /// Also compares the checksums of a copy that is there already, for which all of it is read.
  bool verify = false;
  /// For how long a process that copies may make no progress before those that wait give up.
  std::chrono::milliseconds patience = std::chrono::minutes(10);
};

/// Copies a file, or a folder with all that is in it, into `folder` and returns the path of the
/// copy, `folder/name`. A copy that is there is used again while the source has the sizes and times
/// that it had.
///
/// **Ranks**: any number of ranks, threads and jobs may call it, with no need to agree: one of a
/// host copies. **Host**: waits until the copy is whole; a line on stderr says for whom. A copy
/// appears whole or not at all, and room for it is reserved before anything is written.
std::string stage_locally(const std::string& path, const std::string& folder,
                          const StageOptions& options = {});

namespace detail {

/// The same; `copied(path)` is called after each file of the source was copied.
std::string stage_locally(const std::string& path, std::string folder, const StageOptions& options,
                          FunctionRef<void(const std::string& path)> copied);

/// Lets one process of a host stage something while others wait: an flock on a file in which its
/// owner writes who it is and how much it has copied. The system frees the lock of a process that
/// is dead, so the next one begins at once.
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
  StageLock(const std::string& path, std::string_view what, const Waiting& waiting);
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

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Keeps two jobs from writing into one folder.

#include <chrono>
#include <string>

#include "lockstep/core/file.hpp"
#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// Owns a folder for one job while it exists: an flock on its file `.lock`, in which the owner is
/// described. The system frees the lock of a process that is dead, however it died, so a job that
/// is started anew takes it at once.
class FolderLock {
 public:
  /// Throws where another job, of this process or another, has had the folder for `patience`: long
  /// enough for a process that is being killed to be gone.
  explicit FolderLock(const std::string& folder,
                      std::chrono::milliseconds patience = std::chrono::seconds(3));
  ~FolderLock();
  FolderLock(FolderLock&&) noexcept = default;
  FolderLock& operator=(FolderLock&&) = delete;

  /// Throws unless the folder is still the one that was locked: another may have been put in its
  /// place, with a lock of its own.
  void require() const;

 private:
  std::string folder_;
  std::string path_;
  Descriptor file_;
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/checkpoint/lock.ipp"
#endif

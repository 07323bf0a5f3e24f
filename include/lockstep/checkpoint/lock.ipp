// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `lock.hpp`.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>

#include "lockstep/checkpoint/lock.hpp"
#include "lockstep/core/deadline.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/thread.hpp"

namespace lockstep::detail {

[[noreturn]] LOCKSTEP_INLINE void fail_locked(const std::string& folder, const std::string& path) {
  std::string owner = read_file(path.c_str());
  if (const std::size_t end = owner.find('\n'); end != std::string::npos) owner.resize(end);
  if (owner.size() > 1000) owner.resize(1000);
  fail("checkpoints",
       {"'", folder, "' belongs to a job that still runs",
        owner.empty() ? std::string() : text({": ", owner})},
       "end that job, or name another folder");
}

LOCKSTEP_INLINE FolderLock::FolderLock(const std::string& folder,
                                       std::chrono::milliseconds patience)
    : folder_(folder), path_(text({folder, "/.lock"})) {
  const Deadline end = Deadline::after(patience);
  file_ = Descriptor(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!file_) {
    fail("checkpoints", {"'", path_, "' cannot be opened: ", error_text(errno)},
         "name a folder in which this job may write");
  }
  while (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    if (error == EINTR) continue;
    if (error == EWOULDBLOCK) {
      if (end.passed()) fail_locked(folder_, path_);
      sleep_for(std::chrono::milliseconds(20));
      continue;
    }
    // Some network file systems have no locks. That is no reason to lose the checkpoints.
    std::fputs(text({"lockstep: checkpoints: '", folder_, "' cannot be locked (", error_text(error),
                     "): see to it that no other job uses this folder\n"})
                   .c_str(),
               stderr);
    return;
  }
  // A full disk has no room for this text; the lock holds without it.
  const std::string owner = text({owner_text(), "\n"});
  [[maybe_unused]] const bool is_empty = ::ftruncate(file_.get(), 0) == 0;
  [[maybe_unused]] const bool is_written = write_all(file_.get(), owner);
}

LOCKSTEP_INLINE FolderLock::~FolderLock() {
  if (!file_) return;
  [[maybe_unused]] const bool is_empty = ::ftruncate(file_.get(), 0) == 0;
}

LOCKSTEP_INLINE void FolderLock::require() const {
  struct stat mine{};
  struct stat there{};
  if (::stat(path_.c_str(), &there) == 0 && ::fstat(file_.get(), &mine) == 0 &&
      mine.st_dev == there.st_dev && mine.st_ino == there.st_ino) {
    return;
  }
  fail("checkpoints", {"'", folder_, "' was removed or replaced while the job ran"},
       "put it back or start the job again, with --resume if it still holds a checkpoint");
}

}  // namespace lockstep::detail

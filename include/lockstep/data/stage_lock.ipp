// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `stage_lock.hpp`.

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>

#include "lockstep/core/deadline.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/data/stage_lock.hpp"

namespace lockstep::detail {

/// Who has the lock and how far it is, in one line.
LOCKSTEP_INLINE std::string stage_owner(const std::string& path) {
  std::string owner = read_file(path.c_str());
  if (const std::size_t end = owner.find('\n'); end != std::string::npos) owner.resize(end);
  if (owner.size() > 1000) owner.resize(1000);
  while (owner.ends_with(' ')) owner.pop_back();
  return owner.empty() ? "another process" : owner;
}

LOCKSTEP_INLINE StageLock::StageLock(std::string_view operation, const std::string& path,
                                     std::string_view what, const Waiting& waiting)
    : file_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666)) {
  if (!file_) fail_writing(operation, path, errno);
  Deadline end = Deadline::after(waiting.patience);
  Deadline line = Deadline::after(waiting.first_line);
  std::string seen;
  while (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    if (error == EINTR) continue;
    if (error != EWOULDBLOCK) {
      fail(operation, {"'", path, "' cannot be locked: ", error_text(error)},
           "name a folder on a disk of this host");
    }
    if (std::string owner = stage_owner(path); owner != seen) {
      seen = owner;
      end = Deadline::after(waiting.patience);
    }
    if (end.passed()) {
      fail(operation,
           {"'", what, "' is being staged by ", seen, ", which has made no progress for ",
            seconds_text(waiting.patience)},
           "end that process, or give StageOptions a longer patience");
    }
    if (line.passed()) {
      std::fputs(text({"lockstep: ", operation, ": '", what, "' is being staged by ", seen,
                       "; waiting for it\n"})
                     .c_str(),
                 stderr);
      line = Deadline::after(waiting.next_lines);
    }
    sleep_for(std::chrono::milliseconds(20));
  }
  owner_ = owner_text();
  say("");
}

LOCKSTEP_INLINE StageLock::~StageLock() {
  [[maybe_unused]] const bool is_empty = ::ftruncate(file_.get(), 0) == 0;
  // Closing is not enough: a process that was forked meanwhile has the file open, too.
  ::flock(file_.get(), LOCK_UN);
}

LOCKSTEP_INLINE void StageLock::progress(std::uint64_t bytes, std::uint64_t all) {
  const auto now = std::chrono::steady_clock::now();
  if (now - said_ < std::chrono::milliseconds(250)) return;
  said_ = now;
  say(text({", ", bytes, " of ", all, " bytes so far"}));
}

LOCKSTEP_INLINE void StageLock::say(std::string_view done) {
  // One call, and never shorter than before, so that nobody reads two texts in one. A full disk has
  // no room for it; the lock holds all the same.
  std::string line = text({owner_, done});
  line.resize(owner_.size() + 80, ' ');
  line += '\n';
  [[maybe_unused]] const ssize_t n = ::pwrite(file_.get(), line.data(), line.size(), 0);
}

}  // namespace lockstep::detail

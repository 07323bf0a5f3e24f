// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `log_file.hpp`.

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

#include "lockstep/core/error.hpp"
#include "lockstep/observe/log_file.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE LogFile::LogFile(const std::string& path, Rank rank) : path_(path) {
  if (rank != Rank{0}) return;
  constexpr int flags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC;
  file_ = Descriptor(::open(path_.c_str(), flags, 0666));
  if (file_) return;
  const int error = errno;
  detail::fail("log", {"'", path_, "' cannot be opened: ", error_text(error)},
               error == ENOENT ? "make its folder first, or name another file"
                               : "name a file that may be written",
               rank);
}

LOCKSTEP_INLINE void LogFile::write(const JsonLine& line) {
  if (!file_) return;
  const std::string bytes = detail::text({line.text(), "\n"});
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::write(file_.get(), bytes.data() + done, bytes.size() - done);
    if (n >= 0) {
      done += static_cast<std::size_t>(n);
    } else if (errno != EINTR) {
      const std::string why = error_text(errno);
      // A part of the line may have been written: it is removed.
      const off_t end = done == 0 ? -1 : ::lseek(file_.get(), 0, SEEK_END);
      if (end >= 0) {
        [[maybe_unused]] const int n = ::ftruncate(file_.get(), end - static_cast<off_t>(done));
      }
      detail::fail("log", {"'", path_, "' cannot be written: ", why},
                   "make room there, or name a file elsewhere", Rank{0});
    }
  }
}

}  // namespace lockstep::detail

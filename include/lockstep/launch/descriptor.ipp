// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `descriptor.hpp`.

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <system_error>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/descriptor.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void Descriptor::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

LOCKSTEP_INLINE std::string error_text(int error) { return std::system_category().message(error); }

LOCKSTEP_INLINE Pipe make_pipe() {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) {
    fail("launch", {"no pipe could be made: ", error_text(errno)},
         "raise the limit on open files (ulimit -n)");
  }
  return {Descriptor(fds[0]), Descriptor(fds[1])};
}

LOCKSTEP_INLINE Descriptor inherited_pipe(int fd) {
  struct stat status{};
  if (fd < 0 || ::fstat(fd, &status) != 0 || !S_ISFIFO(status.st_mode)) return {};
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return Descriptor(fd);
}

LOCKSTEP_INLINE void make_nonblocking(int fd) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

LOCKSTEP_INLINE bool wait_ready(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, deadline.poll_timeout());
    if (ready > 0) return true;
    if (ready == 0 && deadline.passed()) return false;
    if (ready < 0 && errno != EINTR) return true;
  }
}

LOCKSTEP_INLINE bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

LOCKSTEP_INLINE std::string read_all(int fd) {
  std::string bytes;
  char buffer[4096];
  for (;;) {
    const ssize_t n = ::read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return bytes;
    bytes.append(buffer, static_cast<std::size_t>(n));
  }
}

LOCKSTEP_INLINE std::string read_file(const char* path) {
  const Descriptor file(::open(path, O_RDONLY | O_CLOEXEC));
  return file ? read_all(file.get()) : std::string();
}

}  // namespace lockstep::detail

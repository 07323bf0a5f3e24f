// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file An open file, socket or pipe that closes itself.

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/deadline.hpp"

namespace lockstep {

/// Owns a file descriptor. Everything this library opens is close-on-exec: a rank that starts
/// another program must not hand it the job's sockets.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() { close(); }

  explicit operator bool() const { return fd_ >= 0; }
  int get() const { return fd_; }

  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

/// What errno means. Unlike strerror, safe with threads.
inline std::string error_text(int error) { return std::system_category().message(error); }

struct Pipe {
  Descriptor read;
  Descriptor write;
};

inline Pipe make_pipe() {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) {
    throw Error("launch", "no pipe could be made: " + error_text(errno),
                "raise the limit on open files (ulimit -n)");
  }
  return {Descriptor(fds[0]), Descriptor(fds[1])};
}

/// A pipe that whoever started this process has handed down by its number; empty where there is
/// none. It goes to no other program.
inline Descriptor inherited_pipe(int fd) {
  struct stat status{};
  if (fd < 0 || ::fstat(fd, &status) != 0 || !S_ISFIFO(status.st_mode)) return {};
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return Descriptor(fd);
}

inline void make_nonblocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

/// Waits until `fd` is ready for `events`, or has failed, which reading or writing then tells.
/// False when the time is over.
inline bool wait_ready(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, deadline.poll_timeout());
    if (ready > 0) return true;
    if (ready == 0 && deadline.passed()) return false;
    if (ready < 0 && errno != EINTR) return true;
  }
}

/// Writes everything to a blocking descriptor; false when nobody reads it any more.
inline bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

/// Reads a blocking descriptor to its end.
inline std::string read_all(int fd) {
  std::string bytes;
  char buffer[4096];
  for (;;) {
    const ssize_t n = ::read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return bytes;
    bytes.append(buffer, static_cast<std::size_t>(n));
  }
}

}  // namespace lockstep

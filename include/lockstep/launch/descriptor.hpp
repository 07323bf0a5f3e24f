// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file An open file, socket or pipe that closes itself.

#include <string>
#include <string_view>
#include <utility>

#include "lockstep/core/macros.hpp"
#include "lockstep/launch/deadline.hpp"

namespace lockstep::detail {

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

  void close();

 private:
  int fd_ = -1;
};

/// The meaning of an errno value. Unlike strerror, it is safe with threads.
std::string error_text(int error);

struct Pipe {
  Descriptor read;
  Descriptor write;
};

Pipe make_pipe();

/// A pipe that this process has inherited, by its number; empty where there is none. Programs that
/// this process starts do not inherit it.
Descriptor inherited_pipe(int fd);

void make_nonblocking(int fd);

/// Waits until `fd` is ready for `events` or has failed. False when the time is over.
bool wait_ready(int fd, short events, Deadline deadline);

/// Writes everything to a blocking descriptor; false when its reader has gone.
bool write_all(int fd, std::string_view bytes);

/// Reads a blocking descriptor to its end.
std::string read_all(int fd);

/// The contents of a file; empty where it cannot be read.
std::string read_file(const char* path);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/descriptor.ipp"
#endif

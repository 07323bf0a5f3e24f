// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Memory that several processes share and that ends with the last of them.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail::shm {

inline Error system_error(const std::string& operation, const std::string& advice) {
  return {operation, std::strerror(errno), advice};
}

/// How much more memory this process may use, by the kernel's and its control group's account.
inline std::size_t available_memory() {
  std::size_t available = std::numeric_limits<std::size_t>::max();
  std::ifstream info("/proc/meminfo");
  for (std::string key; info >> key;) {
    std::size_t value = 0;
    std::string unit;
    info >> value >> unit;
    if (key == "MemAvailable:") available = value << 10;
  }
  std::size_t limit = 0;
  std::size_t used = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit &&
      std::ifstream("/sys/fs/cgroup/memory.current") >> used) {
    available = std::min(available, limit > used ? limit - used : 0);
  }
  return available;
}

/// A file in memory. It has no name, so nothing is left in /dev/shm however its users end; another
/// process opens it through the file descriptor of one that has it.
class MemoryFile {
 public:
  MemoryFile() = default;

  static MemoryFile create() {
    const int fd = ::memfd_create("lockstep", MFD_CLOEXEC);
    if (fd < 0)
      throw system_error("shared memory", "memfd_create failed; is the kernel older than 3.17?");
    return MemoryFile(fd);
  }

  /// The file that process `pid` has as descriptor `fd`.
  static MemoryFile open_of(int pid, int fd) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (own < 0) {
      throw system_error(
          "shared memory, opening " + path,
          "ranks that share memory must run on one host, in one container, as one user");
    }
    return MemoryFile(own);
  }

  MemoryFile(MemoryFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  MemoryFile& operator=(MemoryFile&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~MemoryFile() {
    if (fd_ >= 0) ::close(fd_);
  }

  int descriptor() const { return fd_; }

  /// Reserves every page up to `bytes`, so that a lack of memory is an error here and not a SIGBUS
  /// later.
  void reserve(std::size_t bytes) const {
    struct stat state{};
    ::fstat(fd_, &state);
    const auto have = static_cast<std::size_t>(state.st_size);
    if (bytes <= have) return;
    const std::size_t available = available_memory();
    const bool enough = bytes - have <= available;
    if (enough &&
        ::posix_fallocate(fd_, static_cast<off_t>(have), static_cast<off_t>(bytes - have)) == 0) {
      return;
    }
    throw Error("shared memory",
                std::to_string((bytes - have) >> 20) + " MiB more are needed and " +
                    std::to_string(available >> 20) + " MiB are available",
                "use fewer ranks, a smaller model, or a host with more memory");
  }

  // Liveness: every rank holds a lock on its own byte, which the kernel drops when the process ends
  // in whatever way. Unlike a process id, a lock is never reused, and a zombie has none.

  void lock_byte(Rank rank) const {
    struct flock lock = byte_of(rank);
    if (::fcntl(fd_, F_SETLK, &lock) != 0) throw system_error("shared memory", "locking failed");
  }

  /// Does another process hold the rank's lock?
  bool is_locked(Rank rank) const {
    struct flock lock = byte_of(rank);
    return ::fcntl(fd_, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
  }

 private:
  explicit MemoryFile(int fd) : fd_(fd) {}

  static struct flock byte_of(Rank rank) {
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = static_cast<off_t>(rank.value());
    lock.l_len = 1;
    return lock;
  }

  int fd_ = -1;
};

/// A piece of a memory file, mapped. Ranks that are threads of one process share one mapping, so
/// that they see the same addresses: it saves page tables, and lets a thread sanitizer see what
/// they do.
class Mapping {
 public:
  Mapping(const MemoryFile& file, std::size_t offset, std::size_t bytes)
      : piece_(find(file, offset, bytes)) {}

  std::byte* data() const { return piece_->data; }
  std::size_t bytes() const { return piece_->bytes; }

 private:
  struct Piece {
    std::byte* data;
    std::size_t bytes;

    Piece(const MemoryFile& file, std::size_t offset, std::size_t length) : bytes(length) {
      void* const mapped = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED,
                                  file.descriptor(), static_cast<off_t>(offset));
      if (mapped == MAP_FAILED)
        throw system_error("shared memory", "mapping failed; check ulimit -v");
      ::madvise(mapped, length, MADV_HUGEPAGE);
      data = static_cast<std::byte*>(mapped);
    }
    Piece(const Piece&) = delete;
    Piece& operator=(const Piece&) = delete;
    ~Piece() { ::munmap(data, bytes); }
  };

  static std::shared_ptr<const Piece> find(const MemoryFile& file, std::size_t offset,
                                           std::size_t bytes) {
    static std::mutex mutex;
    static std::map<std::pair<ino_t, std::size_t>, std::weak_ptr<const Piece>> pieces;
    struct stat state{};
    ::fstat(file.descriptor(), &state);
    const std::lock_guard lock(mutex);
    std::erase_if(pieces, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<const Piece>& known = pieces[{state.st_ino, offset}];
    std::shared_ptr<const Piece> piece = known.lock();
    if (piece == nullptr) known = piece = std::make_shared<const Piece>(file, offset, bytes);
    return piece;
  }

  std::shared_ptr<const Piece> piece_;
};

}  // namespace lockstep::detail::shm

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `memory_file.hpp`.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/backends/shm/memory_file.hpp"
#include "lockstep/core/error.hpp"

namespace lockstep::detail::shm {

/// The number after `label` in a file of the kernel; the largest number if there is none.
LOCKSTEP_INLINE std::size_t number_in(const char* path, std::string_view label) {
  const std::string contents = read_file(path);
  const std::size_t found = contents.find(label);
  const char* const digits =
      found == std::string::npos ? "" : contents.c_str() + found + label.size();
  char* end = nullptr;
  const std::size_t number = std::strtoull(digits, &end, 10);
  return end == digits ? std::numeric_limits<std::size_t>::max() : number;
}

/// How much more memory this process may use, according to the kernel and its control group.
LOCKSTEP_INLINE std::size_t available_memory() {
  constexpr std::size_t unknown = std::numeric_limits<std::size_t>::max();
  const std::size_t kilobytes = number_in("/proc/meminfo", "MemAvailable:");
  const std::size_t available = kilobytes == unknown ? unknown : kilobytes << 10;
  const std::size_t limit = number_in("/sys/fs/cgroup/memory.max", "");
  const std::size_t used = number_in("/sys/fs/cgroup/memory.current", "");
  if (limit == unknown || used == unknown) return available;
  const std::size_t left = limit > used ? limit - used : 0;
  return left < available ? left : available;
}

LOCKSTEP_INLINE MemoryFile MemoryFile::create() {
  Descriptor file(::memfd_create("lockstep", MFD_CLOEXEC));
  if (!file) {
    fail("shared memory", {error_text(errno)},
         "memfd_create failed; is the kernel older than 3.17?");
  }
  return MemoryFile(std::move(file));
}

LOCKSTEP_INLINE MemoryFile MemoryFile::open_of(int pid, int fd) {
  const std::string path = text({"/proc/", pid, "/fd/", fd});
  Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file) {
    fail(text({"shared memory, opening ", path}), {error_text(errno)},
         "ranks that share memory must run on one host, in one container, as one user");
  }
  return MemoryFile(std::move(file));
}

LOCKSTEP_INLINE void MemoryFile::reserve(std::size_t bytes) const {
  struct stat state{};
  ::fstat(descriptor(), &state);
  const auto have = static_cast<std::size_t>(state.st_size);
  if (bytes <= have) return;
  const std::size_t available = available_memory();
  const bool enough = bytes - have <= available;
  if (enough && ::posix_fallocate(descriptor(), static_cast<off_t>(have),
                                  static_cast<off_t>(bytes - have)) == 0) {
    return;
  }
  fail("shared memory",
       {(bytes - have) >> 20, " MiB more are needed and ", available >> 20, " MiB are available"},
       "use fewer ranks, a smaller model, or a host with more memory");
}

LOCKSTEP_INLINE struct flock byte_of(Rank rank) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(rank.value());
  lock.l_len = 1;
  return lock;
}

LOCKSTEP_INLINE void MemoryFile::lock_byte(Rank rank) const {
  struct flock lock = byte_of(rank);
  if (::fcntl(descriptor(), F_SETLK, &lock) != 0) {
    fail("shared memory", {error_text(errno)}, "locking failed");
  }
}

LOCKSTEP_INLINE bool MemoryFile::is_locked(Rank rank) const {
  struct flock lock = byte_of(rank);
  return ::fcntl(descriptor(), F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

/// The mappings of this process.
struct KnownMapping {
  ino_t file;
  std::size_t offset;
  std::weak_ptr<std::byte> data;
};

LOCKSTEP_INLINE Mapping::Mapping(const MemoryFile& file, std::size_t offset, std::size_t bytes)
    : bytes_(bytes) {
  static std::mutex mutex;
  static std::vector<KnownMapping> known;
  struct stat state{};
  ::fstat(file.descriptor(), &state);
  const std::lock_guard lock(mutex);
  std::size_t kept = 0;
  for (KnownMapping& mapping : known) {
    std::shared_ptr<std::byte> data = mapping.data.lock();
    if (!data) continue;
    if (mapping.file == state.st_ino && mapping.offset == offset) data_ = std::move(data);
    std::swap(known[kept++], mapping);
  }
  while (known.size() > kept) known.pop_back();
  if (data_) return;
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor(),
                              static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) {
    fail("shared memory", {error_text(errno)}, "mapping failed; check ulimit -v");
  }
  ::madvise(mapped, bytes, MADV_HUGEPAGE);
  data_ = std::shared_ptr<std::byte>(static_cast<std::byte*>(mapped),
                                     [bytes](std::byte* data) { ::munmap(data, bytes); });
  known.push_back({state.st_ino, offset, data_});
}

}  // namespace lockstep::detail::shm

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Memory that several processes share and that ends with the last of them.

#include <cstddef>
#include <memory>

#include "lockstep/core/file.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail::shm {

/// A file in memory. It has no name, so nothing is left in /dev/shm however its users end; another
/// process opens it through the file descriptor of one that has it.
class MemoryFile {
 public:
  MemoryFile() = default;
  static MemoryFile create();

  /// The file that process `pid` has as descriptor `fd`.
  static MemoryFile open_of(int pid, int fd);

  int descriptor() const { return file_.get(); }

  /// Reserves every page up to `bytes`, so that a lack of memory is an error here and not a SIGBUS
  /// later.
  void reserve(std::size_t bytes) const;

  // Liveness: every rank holds a lock on its own byte, which the kernel drops when the process ends
  // in whatever way. Unlike a process id, a lock is never reused, and a zombie has none.

  void lock_byte(Rank rank) const;

  /// Does another process hold the rank's lock?
  bool is_locked(Rank rank) const;

 private:
  explicit MemoryFile(Descriptor file) : file_(std::move(file)) {}

  Descriptor file_;
};

/// A piece of a memory file, mapped. Ranks that are threads of one process share one mapping, so
/// that they see the same addresses: it saves page tables, and lets a thread sanitizer see what
/// they do.
class Mapping {
 public:
  Mapping(const MemoryFile& file, std::size_t offset, std::size_t bytes);

  std::byte* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<std::byte> data_;
  std::size_t bytes_;
};

}  // namespace lockstep::detail::shm

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/comm/backends/shm/memory_file.ipp"
#endif

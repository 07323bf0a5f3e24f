// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The memory that processes of one host share: the file, the arenas in it, and the
/// blocks through which ranks tell each other of their calls, progress and faults.

#include <atomic>

#include "lockstep/comm/call/peers.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail::shm {

/// A file in memory. It has no name, so nothing is left in /dev/shm however its users end; another
/// process opens it through the file descriptor of one that has it.
class MemoryFile {
 public:
  MemoryFile() = default;
  explicit MemoryFile(Descriptor file) : file_(std::move(file)) {}

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

/// Memory that every rank has a part of, `stride` bytes each, beginning at `offset` of the file.
/// What all ranks have in common has no stride.
struct Arena {
  Mapping mapping;
  std::size_t offset;
  std::size_t stride;
};

/// Data of up to this many bytes travels inside the call and needs one synchronisation only.
inline constexpr std::size_t small_bytes = 4096;

/// How many calls may be under way at once.
inline constexpr std::size_t ring = 16;

/// How much private memory a rank copies through shared memory at a time.
inline constexpr std::size_t staging_bytes = 1_MiB;

/// A call and, if it is small, its data.
struct alignas(line_pair) Slot {
  Call call;
  std::uint64_t offset;  // of the data in the arena file, if other ranks can see it there
  alignas(line_pair) std::array<std::byte, small_bytes> data;
};

/// A message from one rank to another, in pieces.
struct alignas(line_pair) Outbox {
  Counter sent;                        // pieces written, by the sender
  Counter received;                    // pieces read, by the receivers
  std::atomic<std::uint64_t> address;  // number of the piece, and to whom: `piece << 16 | rank`
  Call call;
  std::uint64_t bytes;
  alignas(line_pair) std::array<std::byte, 64_KiB> data;
};

/// All control data that one rank writes.
struct alignas(line_pair) RankBlock {
  RankState state;
  Counter finished;  // calls whose work on other ranks' memory is done
  std::array<Slot, ring> slots;
  Outbox outbox;
  alignas(line_pair) std::array<std::byte, staging_bytes> staging;
};

}  // namespace lockstep::detail::shm

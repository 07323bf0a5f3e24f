// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The memory that ranks of a host share: the file, its arenas, and their control blocks.

#include "lockstep/detail/comm/call/peers.hpp"
#include "lockstep/detail/core/file.hpp"

namespace lockstep::detail::shm {

// Ranks share a file in memory (memfd). It has no name: nothing is left in /dev/shm at the end.

/// Maps a range of the file, once per process: ThreadSanitizer needs equal addresses.
std::shared_ptr<std::byte> map_memory(const Descriptor& file, std::size_t offset,
                                      std::size_t bytes);

/// Memory at `offset` of the file, `stride` bytes for each rank; no stride if all ranks share it.
struct Arena {
  std::shared_ptr<std::byte> memory;
  std::size_t bytes;
  std::size_t offset;
  std::size_t stride;
};

/// Data of up to this many bytes is copied into the slot and needs one synchronization only.
inline constexpr std::size_t small_bytes = 4096;

/// The number of calls that may be in flight at once.
inline constexpr std::size_t ring = 16;

/// The bytes of private memory that a rank stages at a time.
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
  std::atomic<std::uint64_t> address;  // `number of the piece << 16 | receiver`
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

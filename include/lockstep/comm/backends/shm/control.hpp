// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The shared memory through which ranks tell each other of their calls, progress and faults.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/waiting/counter.hpp"
#include "lockstep/core/bytes.hpp"

namespace lockstep::detail::shm {

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
  Counter arrived;                     // calls posted: their slots may be read
  Counter finished;                    // calls whose work on other ranks' memory is done
  std::atomic<std::uint32_t> process;  // its id, once it has joined
  std::atomic<std::uint32_t> left;
  std::atomic<std::uint32_t> failed;
  std::array<char, 512> last_words;
  std::array<Slot, ring> slots;
  Outbox outbox;
  alignas(line_pair) std::array<std::byte, staging_bytes> staging;
};

}  // namespace lockstep::detail::shm

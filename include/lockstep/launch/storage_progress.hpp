// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How much this process has read from storage and written to it.

#include <atomic>
#include <cstdint>

namespace lockstep::detail {

/// A count that every read, write and sync of a large file raises. A process whose count stands
/// still for long is stuck in its storage. Any thread may raise it.
inline std::atomic<std::uint64_t>& storage_progress() {
  static std::atomic<std::uint64_t> count{0};
  return count;
}

inline void note_storage_progress() { storage_progress().fetch_add(1, std::memory_order_relaxed); }

}  // namespace lockstep::detail

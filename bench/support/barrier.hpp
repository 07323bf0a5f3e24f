// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The barriers of the benchmark itself and of its plain peer.

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>

namespace bench {

inline std::size_t cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? static_cast<std::size_t>(CPU_COUNT(&set))
                                                      : 1;
}

/// Lies in shared memory, where zeroes are its first state. The last to arrive lets all go.
class Barrier {
 public:
  /// Spins, then yields: quick, but takes a core from whoever is late.
  void wait(std::uint32_t ranks) {
    static const int spins = ranks <= cores() ? 2000 : 0;
    const std::uint32_t turn = turn_.load(std::memory_order_acquire);
    if (arrive(turn, ranks)) return;
    for (int i = 0; turn_.load(std::memory_order_acquire) == turn; ++i) {
      if (i >= spins) sched_yield();
    }
  }

  /// Sleeps: whoever is late has the machine to itself, and all its threads.
  void sleep(std::uint32_t ranks) {
    const std::uint32_t turn = turn_.load(std::memory_order_acquire);
    if (arrive(turn, ranks)) {
      syscall(SYS_futex, &turn_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
      return;
    }
    while (turn_.load(std::memory_order_acquire) == turn) {
      syscall(SYS_futex, &turn_, FUTEX_WAIT, turn, nullptr, nullptr, 0);
    }
  }

 private:
  bool arrive(std::uint32_t turn, std::uint32_t ranks) {
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < ranks) return false;
    arrived_.store(0, std::memory_order_relaxed);
    turn_.store(turn + 1, std::memory_order_release);
    return true;
  }

  alignas(128) std::atomic<std::uint32_t> arrived_;
  alignas(128) std::atomic<std::uint32_t> turn_;
};

}  // namespace bench

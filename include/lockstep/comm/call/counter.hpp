// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Waiting: for a counter that one thread or process raises and others wait for (they
/// spin, yield, then sleep), and for a GPU by polling.

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <ctime>

#include "lockstep/core/standard.hpp"

namespace lockstep::detail {

/// Two cache lines, because prefetchers fetch them in pairs.
inline constexpr std::size_t line_pair = 128;

/// A counter that may lie in memory that processes share. `sleepers` spares the writer a system
/// call when no one sleeps.
struct alignas(line_pair) Counter {
  std::atomic<std::uint64_t> value;
  std::atomic<std::uint32_t> sleepers;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::
                   : "memory");  // `yield` is a no-op on most cores; isb gives the pipeline a rest
#endif
}

/// How long a rank tries before it sleeps. Spinning wins while every rank has a core; with more
/// ranks than cores it only keeps the awaited rank from running. Spinning is bounded by time, not
/// by count: a pause takes 14 ns on one core and 50 on another, and a rank that shares its core
/// after all must not pay for it long.
struct SpinBudget {
  std::chrono::nanoseconds spin{4000};
  int yields = 1000;

  static SpinBudget for_ranks(std::size_t local_ranks) {
    cpu_set_t set;
    CPU_ZERO(&set);
    const int cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
    if (local_ranks <= static_cast<std::size_t>(cores)) return {};
    return {std::chrono::nanoseconds(0), 200};
  }
};

/// The low half of a counter, which is what the kernel compares.
inline std::uint32_t* futex_word(Counter& counter) {
  static_assert(std::endian::native == std::endian::little);
  return reinterpret_cast<std::uint32_t*>(&counter.value);
}

/// Wakes all sleepers of a counter, whose value has not changed.
inline void wake(Counter& counter) {
  if (counter.sleepers.load(std::memory_order_seq_cst) != 0) {
    ::syscall(SYS_futex, futex_word(counter), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }
}

/// Makes a new value visible and wakes all sleepers.
inline void publish(Counter& counter, std::uint64_t value) {
  counter.value.store(value, std::memory_order_seq_cst);
  wake(counter);
}

inline bool reached(const Counter& counter, std::uint64_t value) {
  return counter.value.load(std::memory_order_acquire) >= value;
}

/// Returns when the counter has reached `value`. Every 50 ms of sleep, `look()` is called: it may
/// throw to end the wait.
template <class Look>
void wait_for(Counter& counter, std::uint64_t value, SpinBudget budget, const Look& look) {
  for (const auto end = std::chrono::steady_clock::now() + budget.spin;
       std::chrono::steady_clock::now() < end;) {
    for (int i = 0; i < 32; ++i) {
      if (reached(counter, value)) return;
      pause_core();
    }
  }
  for (int i = 0; i < budget.yields; ++i) {
    if (reached(counter, value)) return;
    ::sched_yield();
  }
  while (!reached(counter, value)) {
    counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint64_t seen = counter.value.load(std::memory_order_seq_cst);
    if (seen < value) {
      const timespec slice{0, 50'000'000};
      ::syscall(SYS_futex, futex_word(counter), FUTEX_WAIT, static_cast<std::uint32_t>(seen),
                &slice, nullptr, 0);
    }
    counter.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (!reached(counter, value)) look();
  }
}

/// Pauses between two polls. The first ones are short, because most waits last microseconds.
class Backoff {
 public:
  void pause() const {
    if (Clock::now() - begin_ < std::chrono::microseconds(200)) {
      ::sched_yield();
    } else {
      const timespec moment{0, 50'000};
      ::nanosleep(&moment, nullptr);
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  Clock::time_point begin_ = Clock::now();
};

}  // namespace lockstep::detail

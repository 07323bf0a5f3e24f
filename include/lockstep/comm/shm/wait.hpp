// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Waiting for another rank's counter: spin, yield, then sleep.

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <ctime>

#include "lockstep/comm/shm/control.hpp"

namespace lockstep::shm {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::
                   : "memory");  // `yield` is a no-op on most cores; isb gives the pipeline a rest
#endif
}

/// How long to try before sleeping. Spinning wins while every rank has a core; with more ranks than
/// cores it only keeps the awaited rank from running. Spinning is bounded by time, not by count: a
/// pause takes 14 ns on one core and 50 on another, and a rank that shares its core after all must
/// not pay for it long.
struct Patience {
  std::chrono::nanoseconds spin{4000};
  int yields = 1000;

  static Patience for_ranks(std::size_t local_ranks) {
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

/// Wakes whoever sleeps for a counter, to look around.
inline void wake(Counter& counter) {
  if (counter.sleepers.load(std::memory_order_seq_cst) != 0) {
    ::syscall(SYS_futex, futex_word(counter), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }
}

/// Makes a new value visible and wakes whoever sleeps for it.
inline void publish(Counter& counter, std::uint64_t value) {
  counter.value.store(value, std::memory_order_seq_cst);
  wake(counter);
}

inline bool reached(const Counter& counter, std::uint64_t value) {
  return counter.value.load(std::memory_order_acquire) >= value;
}

/// Returns when the counter has reached `value`. Every 50 ms of sleep, `look` looks after the other
/// rank and the time, and throws if there is nothing to wait for any more.
template <class Look>
void wait_for(Counter& counter, std::uint64_t value, Patience patience, const Look& look) {
  for (const auto end = std::chrono::steady_clock::now() + patience.spin;
       std::chrono::steady_clock::now() < end;) {
    for (int i = 0; i < 32; ++i) {
      if (reached(counter, value)) return;
      pause();
    }
  }
  for (int i = 0; i < patience.yields; ++i) {
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

}  // namespace lockstep::shm

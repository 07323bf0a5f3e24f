// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A clock for records: the processor's counter, read in a few nanoseconds.

#include "lockstep/detail/core/standard.hpp"

namespace lockstep::detail {

/// The processor's counter. It counts at one rate on all cores, and is 0 only before the first
/// read.
inline std::uint64_t ticks_now() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  std::uint64_t ticks = 0;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

/// Converts ticks to times of `std::chrono::steady_clock`, by two readings of both clocks: the
/// first at the program's start, the other now.
class TickScale {
 public:
  TickScale();

  std::chrono::nanoseconds time(std::uint64_t ticks) const {
    const double since = static_cast<double>(static_cast<std::int64_t>(ticks - ticks_));
    return time_ + std::chrono::nanoseconds(static_cast<std::int64_t>(since * period_));
  }

 private:
  std::uint64_t ticks_;
  std::chrono::nanoseconds time_;
  double period_;  // nanoseconds of a tick
};

}  // namespace lockstep::detail

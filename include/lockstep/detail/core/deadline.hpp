// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Time: when a wait ends, how long one has lasted, limits as text, and the clock of records.

#include <climits>

#include "lockstep/detail/core/standard.hpp"

namespace lockstep::detail {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// `limit` from now. More than a year is `never`, so that the sum cannot overflow.
  static Deadline after(std::chrono::milliseconds limit) {
    if (limit > std::chrono::hours(24 * 365)) return never();
    return Deadline(limit.count() > 0 ? Clock::now() + limit : Clock::now());
  }
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  friend Deadline sooner(Deadline a, Deadline b) { return a.when_ < b.when_ ? a : b; }

  Clock::time_point when() const { return when_; }
  bool is_ever() const { return when_ != Clock::time_point::max(); }
  bool passed() const { return when_ != Clock::time_point::max() && Clock::now() >= when_; }

  /// The argument of poll(), -1 for no limit; rounded up, so that no wait ends early and spins.
  int poll_timeout() const {
    if (when_ == Clock::time_point::max()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(when_ - Clock::now()).count();
    return left <= 0 ? 0 : left < INT_MAX ? static_cast<int>(left) : INT_MAX;
  }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}

  Clock::time_point when_;
};

/// How long somebody waits who looks every few milliseconds. A longer pause between two looks
/// counts as a second: the process was stopped then, or its machine, and with a job that a batch
/// system suspends those that it waits for.
class WaitTime {
 public:
  using Clock = Deadline::Clock;

  explicit WaitTime(Clock::time_point begin = Clock::now()) : begin_(begin), looked_(begin) {}

  Clock::time_point begin() const { return begin_; }
  Clock::duration until(Clock::time_point now) {
    waited_ += std::min<Clock::duration>(now - looked_, std::chrono::seconds(1));
    looked_ = now;
    return waited_;
  }

 private:
  Clock::time_point begin_;
  Clock::time_point looked_;
  Clock::duration waited_{0};
};

/// A time limit in messages: `2 s`, `0.25 s`.
std::string seconds_text(std::chrono::milliseconds limit);

/// Parses a time limit in seconds, which may have a fraction; see `parse_number` for `name`.
std::chrono::milliseconds parse_seconds(std::string_view name, std::string_view text);

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

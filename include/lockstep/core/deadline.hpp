// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A point in time after which waiting is over, in the forms that poll() and messages need,
/// and time limits as text.

#include <climits>

#include "lockstep/core/standard.hpp"

namespace lockstep::detail {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// `limit` from now. Anything beyond a year is `never`, so that adding it cannot overflow.
  static Deadline after(std::chrono::milliseconds limit) {
    if (limit > std::chrono::hours(24 * 365)) return never();
    return Deadline(limit.count() > 0 ? Clock::now() + limit : Clock::now());
  }
  static Deadline at(Clock::time_point when) { return Deadline(when); }
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  /// The earlier of two.
  friend Deadline sooner(Deadline a, Deadline b) { return a.when_ < b.when_ ? a : b; }

  Clock::time_point when() const { return when_; }
  bool is_ever() const { return when_ != Clock::time_point::max(); }
  bool passed() const { return when_ != Clock::time_point::max() && Clock::now() >= when_; }

  /// For poll(): -1 is for ever. Rounded up, or the last millisecond would be spent spinning.
  int poll_timeout() const {
    if (when_ == Clock::time_point::max()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(when_ - Clock::now()).count();
    return left <= 0 ? 0 : left < INT_MAX ? static_cast<int>(left) : INT_MAX;
  }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}

  Clock::time_point when_;
};

/// `2 s`, `0.25 s`: time limits as messages write them.
std::string seconds_text(std::chrono::milliseconds limit);

/// A time limit in seconds, with or without a fraction. `name` is the variable or option that has
/// this text.
std::chrono::milliseconds parse_seconds(std::string_view name, std::string_view text);

}  // namespace lockstep::detail

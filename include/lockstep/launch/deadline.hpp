// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A point in time after which waiting is over, in the forms that poll() and messages need.

#include <algorithm>
#include <chrono>
#include <climits>
#include <string>

namespace lockstep {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// `limit` from now. Anything beyond a year is `never`, so that adding it cannot overflow.
  static Deadline after(std::chrono::milliseconds limit) {
    if (limit > std::chrono::hours(24 * 365)) return never();
    return Deadline(Clock::now() + std::max(limit, std::chrono::milliseconds(0)));
  }
  static Deadline at(Clock::time_point when) { return Deadline(when); }
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  /// The earlier of two.
  friend Deadline sooner(Deadline a, Deadline b) { return a.when_ < b.when_ ? a : b; }

  bool passed() const { return when_ != Clock::time_point::max() && Clock::now() >= when_; }

  /// For poll(): -1 is for ever. Rounded up, or the last millisecond would be spent spinning.
  int poll_timeout() const {
    if (when_ == Clock::time_point::max()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(when_ - Clock::now()).count();
    return static_cast<int>(std::clamp<decltype(left)>(left, 0, INT_MAX));
  }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}

  Clock::time_point when_;
};

/// `2 s`, `0.25 s`: time limits as messages write them.
inline std::string seconds_text(std::chrono::milliseconds limit) {
  std::string text = std::to_string(limit.count() / 1000);
  if (limit.count() % 1000 != 0) {
    std::string fraction = std::to_string(1000 + limit.count() % 1000).substr(1);
    fraction.erase(fraction.find_last_not_of('0') + 1);
    text += "." + fraction;
  }
  return text + " s";
}

}  // namespace lockstep

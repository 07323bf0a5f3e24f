// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How long a loop waits for its data.

#include <chrono>

namespace lockstep::detail {

/// Reading the clock takes as long as loading a small batch. So after a short wait the next fifteen
/// are not measured but taken to be as long; long waits are measured one by one.
class WaitMeter {
 public:
  using Clock = std::chrono::steady_clock;

  /// Calls `f`, for which the loop waits, and returns its result.
  template <class F>
  decltype(auto) measure(F&& f) {
    if (unmeasured_ != 0) {
      --unmeasured_;
      total_ += latest_;
      return f();
    }
    const Stop stop{*this, Clock::now()};
    return f();
  }

  std::chrono::duration<double> total() const { return total_; }

 private:
  struct Stop {
    WaitMeter& meter;
    Clock::time_point begin;
    ~Stop() { meter.add(Clock::now() - begin); }
  };

  void add(Clock::duration wait) {
    total_ += wait;
    latest_ = wait;
    unmeasured_ = wait < std::chrono::microseconds(2) ? 15 : 0;
  }

  Clock::duration total_{};
  Clock::duration latest_{};
  unsigned unmeasured_ = 0;
};

}  // namespace lockstep::detail

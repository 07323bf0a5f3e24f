// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Pauses for a thread that waits for a GPU or another thread by polling.

#include <chrono>
#include <thread>

namespace lockstep::detail {

/// Pauses between two polls. The first ones are short, because most waits last microseconds.
class Backoff {
 public:
  void pause() const {
    if (Clock::now() - begin_ < std::chrono::microseconds(200)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  Clock::time_point begin_ = Clock::now();
};

}  // namespace lockstep::detail

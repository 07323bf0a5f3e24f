// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A thread that carries on asynchronous calls while the rank computes.

#include <chrono>
#include <mutex>
#include <thread>

#include "lockstep/comm/shm/engine.hpp"

namespace lockstep::shm {

/// The right to use an engine: taken turns at where there is a helper, nothing where there is none.
template <bool Helped>
class Turn {
 public:
  explicit Turn(Engine&) {}
};
template <>
class Turn<true> {
 public:
  explicit Turn(Engine& engine) : lock_(engine.turns()) {}

 private:
  std::lock_guard<std::mutex> lock_;
};

/// Does the work of pending calls as soon as all ranks have posted them. It never waits inside a
/// turn, and leaves errors to the rank, which finds them when it waits.
class Helper {
 public:
  explicit Helper(Engine& engine)
      : thread_([&engine](const std::stop_token& stop) { run(engine, stop); }) {}

 private:
  static void run(Engine& engine, const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      bool worked = false;
      {
        const Turn<true> turn(engine);
        worked = engine.work_if_ready();
      }
      if (!worked) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  std::jthread thread_;
};

}  // namespace lockstep::shm

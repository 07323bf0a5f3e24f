// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A thread that carries on asynchronous calls while the rank computes.

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>

#include "lockstep/comm/backends/shm/engine.hpp"
#include "lockstep/core/thread.hpp"

namespace lockstep::detail::shm {

/// The right to use an engine: a lock where there is a helper, nothing where there is none.
template <bool Helped>
struct EngineLock {
  explicit EngineLock(Engine&) {}
};
template <>
struct EngineLock<true> {
  explicit EngineLock(Engine& engine) : lock(engine.turns()) {}
  std::lock_guard<std::mutex> lock;
};

/// Does the work of pending calls as soon as all ranks have posted them. It never waits while it
/// holds the engine, and leaves errors to the rank, which finds them when it waits.
class Helper {
 public:
  explicit Helper(Engine& engine)
      : thread_(
            ThreadName{"lockstep helper", "the helper thread of Progress<HelperThread>"},
            [&engine, this] { run(engine); },
            [&engine](const std::exception_ptr&) {
              engine.abandon("its helper thread ended with an exception");
            }) {}
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;
  ~Helper() { stopping_.store(true); }

 private:
  void run(Engine& engine) const {
    while (!stopping_.load()) {
      bool worked = false;
      {
        const EngineLock<true> lock(engine);
        worked = engine.work_if_ready();
      }
      if (!worked) sleep_for(std::chrono::microseconds(50));
    }
  }

  std::atomic<bool> stopping_ = false;
  Thread thread_;  // is joined before the flag ends
};

}  // namespace lockstep::detail::shm

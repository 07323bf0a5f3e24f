// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A request that may be left unanswered.

#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "lockstep/comm/quiet_thread.hpp"
#include "lockstep/core/error.hpp"

namespace lockstep {

/// `f()`, unless it takes longer than that or throws an `Error`. It runs in a thread of its own,
/// which is left behind with what it has if it does not come back: a store whose host has vanished
/// answers after seconds only, and a rank that is about to fail does not have them.
template <class F>
auto within(std::chrono::milliseconds limit, F f) -> std::optional<decltype(f())> {
  std::packaged_task<decltype(f())()> task(std::move(f));
  auto answer = task.get_future();
  without_signals([&] { std::thread(std::move(task)).detach(); });
  if (answer.wait_for(limit) != std::future_status::ready) return std::nullopt;
  try {
    return answer.get();
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace lockstep

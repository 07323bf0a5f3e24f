// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A request that may be left unanswered.

#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/core/thread.hpp"

namespace lockstep::detail {

/// `f()`, unless it takes longer than that or throws an `Error`. It runs in a thread of its own; if
/// it does not come back in time, that thread is left alone with what it uses. A store whose host
/// has vanished answers only after seconds, which a rank that is about to fail does not have.
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

}  // namespace lockstep::detail

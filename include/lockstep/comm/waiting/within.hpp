// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A request with a time limit.

#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/core/thread.hpp"

namespace lockstep::detail {

/// The result of `f()`; nothing if it takes longer than the limit or throws an `Error`. `f` runs in
/// a thread, which is left to itself when the time is over. A store whose host has vanished answers
/// only after seconds, and a rank that is about to fail cannot wait that long. Where no thread can
/// be started it has to: `f` then runs here.
template <class F>
auto within(std::chrono::milliseconds limit, F f) -> std::optional<decltype(f())> {
  const auto task = std::make_shared<std::packaged_task<decltype(f())()>>(std::move(f));
  auto answer = task->get_future();
  try {
    Thread(
        ThreadName{"lockstep asks", "the thread of a request"}, [task] { (*task)(); },
        [](const std::exception_ptr&) {})
        .detach();
  } catch (const Error&) {
    (*task)();
  }
  if (answer.wait_for(limit) != std::future_status::ready) return std::nullopt;
  try {
    return answer.get();
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `share_work.hpp`.

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/share_work.hpp"
#include "lockstep/core/thread.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void share_work(std::size_t tasks, FunctionRef<void(std::size_t)> f) {
  std::atomic<std::size_t> next = 0;
  std::atomic<bool> has_failed = false;
  std::exception_ptr failure;
  const auto work = [&] {
    for (std::size_t i = next++; i < tasks && !has_failed; i = next++) f(i);
  };
  const auto report = [&](std::exception_ptr error) {
    if (!has_failed.exchange(true)) failure = std::move(error);
  };
  {
    constexpr std::size_t most_threads = 4;
    std::vector<Thread> threads;
    try {
      while (threads.size() + 1 < std::min({most_threads, core_count(), tasks}))
        threads.emplace_back(ThreadName{"lockstep shares", "a helper"}, work, report);
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): fewer threads do the same work
    }
    try {
      work();
    } catch (...) {
      report(std::current_exception());
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace lockstep::detail

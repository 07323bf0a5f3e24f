// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks that are threads and share the first GPU: runs a function on each, and times the
/// ways that they make a step.

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/detail/comm/threads/communicator.cuh"
#include "measure.hpp"

namespace bench {

/// `f(comm)` on every rank, a thread each. What the first rank to fail has thrown is thrown here.
template <std::size_t Ranks, class F>
void on_ranks(const F& f) {
  using namespace lockstep;
  const auto world = std::make_shared<lockstep::detail::threads::SharedWorld>(WorldSize{Ranks});
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::jthread> threads;
  for (std::size_t r = 0; r < Ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        ThreadCommunicator<Ranks> comm(world, Rank{r}, std::make_shared<Gpu>(Rank{r}, 0),
                                       std::chrono::seconds(60));
        f(comm);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  threads.clear();
  if (first) std::rethrow_exception(first);
}

/// Until all ranks' streams have done what they were given.
template <class Comm>
void settle(Comm& comm) {
  comm.synchronize();
  comm.barrier();
}

/// Microseconds a step of each way, from all ranks' start to all ranks' end, by turns. A way makes
/// as many steps as it is told.
template <class Comm>
std::vector<Times> race(Comm& comm, const std::vector<std::function<void(int)>>& ways, int steps) {
  std::vector<std::vector<double>> times(ways.size());
  for (int turn = 0; turn < 15; ++turn) {
    for (std::size_t w = 0; w != ways.size(); ++w) {
      ways[w](3);
      settle(comm);
      const auto begin = Clock::now();
      ways[w](steps);
      settle(comm);
      times[w].push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count() /
                         steps);
    }
  }
  std::vector<Times> all;
  for (const auto& each : times) all.push_back(summary(each));
  return all;
}

}  // namespace bench

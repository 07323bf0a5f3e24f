// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Runs a function on the ranks of one process, each a thread with a part in a rendezvous.

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "launch/watchdog.hpp"
#include "lockstep/detail/comm/threads/rendezvous.hpp"

namespace participants {

using namespace lockstep;
using namespace lockstep::detail;
using namespace std::chrono_literals;
using threads::CallArguments;
using threads::RankHandle;
using threads::Rendezvous;

/// What each rank ended with: nothing, or the words of its exception.
using Ends = std::vector<std::string>;

/// `with_rank(rank)` on as many threads. Nothing it throws gets out. Where a thread hangs, the
/// process ends and names the test case.
inline Ends run_threads(std::size_t world, const std::function<void(Rank)>& with_rank) {
  const Watchdog watchdog(120s);
  Ends ends(world);
  std::vector<std::jthread> threads;
  for (std::size_t r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      try {
        with_rank(Rank{r});
      } catch (const std::exception& error) {
        ends[r] = error.what();
      }
    });
  }
  threads.clear();
  return ends;
}

/// `f(handle)` on every rank of one rendezvous.
inline Ends run(std::size_t world, auto f, std::chrono::milliseconds timeout = 20s) {
  const auto rendezvous = std::make_shared<Rendezvous>(WorldSize{world});
  return run_threads(world, [&](Rank rank) {
    RankHandle handle(rendezvous, rank, timeout);
    f(handle);
  });
}

}  // namespace participants

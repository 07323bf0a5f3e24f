// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Runs a function on the ranks of one process, each a thread with a part in a meeting.

#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "launch/watchdog.hpp"
#include "lockstep/comm/backends/threads/meeting.hpp"

namespace participants {

using namespace lockstep;
using namespace lockstep::detail;
using namespace std::chrono_literals;
using threads::Meeting;
using threads::Offer;
using threads::Participant;

/// What each rank ended with: nothing, or the words of its exception.
using Ends = std::vector<std::string>;

/// `with_rank(rank)` on as many threads. Nothing it throws gets out. Where a thread hangs, the
/// process ends and names the test case.
inline Ends run_threads(std::size_t world, auto with_rank) {
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

/// `f(participant)` on every rank of one meeting.
inline Ends run(std::size_t world, auto f, threads::Milliseconds timeout = 20s) {
  const auto meeting = std::make_shared<Meeting>(WorldSize{world});
  return run_threads(world, [&](Rank rank) {
    Participant participant(meeting, rank, timeout);
    f(participant);
  });
}

}  // namespace participants

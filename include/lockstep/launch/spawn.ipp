// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `spawn.hpp`.

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <iostream>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/launch/failure.hpp"
#include "lockstep/launch/openmp.hpp"
#include "lockstep/launch/spawn.hpp"
#include "lockstep/launch/store_server.hpp"
#include "lockstep/launch/supervisor.hpp"

namespace lockstep::detail {

/// A rank's exception as an `Error` that names the rank.
LOCKSTEP_INLINE Error named_error(const Failure& failure, Rank rank) {
  if (failure.operation.empty()) {
    return {"spawn", failure.problem, "it was thrown by the spawned function", rank};
  }
  return {failure.operation, failure.problem, failure.advice, failure.rank.value_or(rank)};
}

LOCKSTEP_INLINE void require_ranks(std::size_t ranks) {
  if (ranks == 0) fail("spawn", {"a world of zero ranks"}, "spawn at least one");
}

LOCKSTEP_INLINE void spawn_threads(std::size_t ranks, RankFunction f,
                                   std::chrono::milliseconds timeout) {
  require_ranks(ranks);
  const std::string secret = random_id();
  const std::string job = random_id();
  allow_open_files(3 * ranks + 64, "a process of", ranks);
  StoreServer server(secret);
  // Connected before any rank runs: a rank that comes to a closed store would wait for it.
  std::vector<Store> stores;
  stores.reserve(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    stores.emplace_back("127.0.0.1", server.port(), secret, timeout);
  }
  std::mutex mutex;
  std::exception_ptr first;
  Rank first_rank;
  std::vector<Thread> threads;
  threads.reserve(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto failed = [&, r](const std::exception_ptr& thrown) {
      const std::lock_guard lock(mutex);
      if (first) return;
      first = thrown;
      first_rank = Rank{r};
      server.shut_down();
    };
    const auto run = [&, r] {
      const Membership member{Rank{r}, WorldSize{ranks}, r,       ranks, "127.0.0.1", server.port(),
                              job,     secret,           timeout, ranks};
      f(member, stores[r]);
    };
    try {
      threads.emplace_back(ThreadName{"lockstep rank", "the thread of a rank"}, run, failed,
                           Signals::delivered);
    } catch (...) {  // the system has no more threads
      failed(std::current_exception());
      break;
    }
  }
  for (Thread& thread : threads) thread.join();
  if (!first) return;
  try {
    std::rethrow_exception(first);
  } catch (const Error& error) {
    throw error.rank() ? error : error.on(first_rank);
  } catch (...) {
    std::throw_with_nested(named_error(Failure::of(first), first_rank));
  }
}

/// Runs a forked rank: learns where the store is, runs, reports a failure, and ends without the
/// parent's atexit handlers and destructors.
[[noreturn]] LOCKSTEP_INLINE void run_forked(Membership member, int start, int report,
                                             RankFunction f) {
  int status = 0;
  try {
    const std::string words = read_all(start);
    store_protocol::Reader told(words);
    member.port = static_cast<std::uint16_t>(told.u32());
    member.secret = told.text();
    member.job = told.text();
    Store store(member.host, member.port, member.secret, member.timeout);
    f(member, store);
  } catch (...) {
    write_all(report, Failure::of(std::current_exception()).bytes());
    status = 1;
  }
  std::cout.flush();
  std::fflush(nullptr);
  ::_exit(status);
}

LOCKSTEP_INLINE void spawn_processes(std::size_t ranks, RankFunction f,
                                     std::chrono::milliseconds timeout) {
  require_ranks(ranks);
  std::cout.flush();
  std::fflush(nullptr);  // or every rank would print what is in the buffers
  allow_open_files(8 * ranks + 64, "spawn of", ranks);  // pipes, connections, pidfds
  const bool had_threads = has_other_threads();
  std::vector<Pipe> starts;
  Outcome outcome;
  {
    Supervisor supervisor(Failures::returned);
    for (std::size_t r = 0; r < ranks; ++r) {
      starts.push_back(make_pipe());
      Pipe report = make_pipe();
      const Membership member{Rank{r}, WorldSize{ranks}, r, ranks, "127.0.0.1", 0, "", "", timeout};
      supervisor.start(Rank{r}, std::move(report.read), [&] {
        for (Pipe& start : starts) start.write.close();
        use_openmp_share(ranks, had_threads);
        run_forked(member, starts[r].read.get(), report.write.get(), f);
      });
    }
    // The server starts after the forks, so that ranks inherit neither its sockets nor threads.
    const std::string secret = random_id();
    const StoreServer server(secret);
    const std::string told =
        store_protocol::Writer{}.u32(server.port()).text(secret).text(random_id()).bytes();
    for (Pipe& start : starts) {
      write_all(start.write.get(), told);
      start.write.close();
    }
    outcome = supervisor.run();
  }
  if (outcome.interrupted != 0) {
    ::raise(outcome.interrupted);  // now the program's own handling applies
    fail("spawn", {"ended by signal ", outcome.interrupted}, "all ranks were ended");
  }
  if (!outcome.stopped.empty() && !outcome.first) {
    fail("spawn", {"the rank ended too early: exit status ", stopped_status},
         "let it return instead", outcome.stopped.front());
  }
  if (!outcome.first) return;
  const RankEnd& end = *outcome.first;
  if (end.failure) throw named_error(*end.failure, end.rank);
  fail("spawn", {"the rank ended too early: ", end.status.text()},
       "look at what it printed, and at core dumps", end.rank);
}

}  // namespace lockstep::detail

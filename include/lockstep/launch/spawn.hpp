// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `spawn<N>(f)`: a job inside a program, its ranks threads or forked processes.

#include <unistd.h>

#include <cstdio>
#include <exception>
#include <iostream>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/launch/failure.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/launch/supervisor.hpp"

namespace lockstep {

/// Ranks are threads of this process: what many ranks on one GPU need.
struct AsThreads {};

/// Ranks are forked copies of this process, which carry on from the call of `spawn`.
struct AsProcesses {};

/// What a rank threw, as an error that names the rank. An `Error` stays what it was; others become
/// one.
inline Error named_error(const Failure& failure, Rank rank) {
  if (failure.operation.empty()) {
    return {"spawn", failure.problem, "it was thrown by the spawned function", rank};
  }
  return {failure.operation, failure.problem, failure.advice, failure.rank.value_or(rank)};
}

/// Runs `f(const Membership&, Store&)` on `ranks` threads, all on the same `f`. When one throws,
/// the store is closed, so that the others do not wait for it in vain; the first exception is
/// thrown here once all have returned.
template <class F>
void spawn(AsThreads, std::size_t ranks, F&& f,
           std::chrono::milliseconds timeout = default_timeout) {
  if (ranks == 0) throw Error("spawn", "a world of zero ranks", "spawn at least one");
  const std::string secret = random_id();
  const std::string job = random_id();
  StoreServer server(secret);
  // Connected before any rank runs: who comes to a store that has been closed would wait for it.
  std::vector<Store> stores;
  stores.reserve(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    stores.emplace_back("127.0.0.1", server.port(), secret, timeout);
  }
  std::mutex mutex;
  std::exception_ptr first;
  Rank first_rank;
  const auto fail = [&](Rank rank) {
    const std::lock_guard lock(mutex);
    if (first) return;
    first = std::current_exception();
    first_rank = rank;
    server.shut_down();
  };
  const auto run = [&](Rank rank) {
    try {
      const Membership member{rank,  WorldSize{ranks}, rank.value(),
                              ranks, "127.0.0.1",      server.port(),
                              job,   secret,           timeout};
      f(member, stores[rank.value()]);
    } catch (...) {
      fail(rank);
    }
  };
  {
    std::vector<std::jthread> threads;
    threads.reserve(ranks);
    for (std::size_t r = 0; r < ranks; ++r) {
      try {
        threads.emplace_back(run, Rank{r});
      } catch (...) {  // the system has no more threads
        fail(Rank{r});
        break;
      }
    }
  }
  if (!first) return;
  try {
    std::rethrow_exception(first);
  } catch (const Error& error) {
    throw error.rank() ? error : error.on(first_rank);
  } catch (...) {
    std::throw_with_nested(named_error(Failure::of(first), first_rank));
  }
}

/// The life of a rank that was forked: learn where the store is, run, say what went wrong, end
/// without the parent's atexit handlers and destructors, which are not this process's business.
template <class F>
[[noreturn]] void run_forked(Membership member, int start, int report, F& f) {
  int status = 0;
  try {
    const std::string words = read_all(start);
    store_protocol::Reader told(words);
    member.port = static_cast<std::uint16_t>(told.u32());
    member.secret = told.text();
    member.job = std::string(told.text());
    Store store(member.host, member.port, member.secret, member.timeout);
    f(std::as_const(member), store);
  } catch (...) {
    write_all(report, Failure::of(std::current_exception()).bytes());
    status = 1;
  }
  std::cout.flush();
  std::fflush(nullptr);
  ::_exit(status);
}

/// Runs `f(const Membership&, Store&)` in `ranks` forked processes, supervised as launched ones
/// are: output prefixed, the first failure ends the rest and is thrown here. Call it while no other
/// thread runs, like fork itself.
template <class F>
void spawn(AsProcesses, std::size_t ranks, F&& f,
           std::chrono::milliseconds timeout = default_timeout) {
  if (ranks == 0) throw Error("spawn", "a world of zero ranks", "spawn at least one");
  std::cout.flush();
  std::fflush(nullptr);  // or every rank would print what is still in the buffers
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
        run_forked(member, starts[r].read.get(), report.write.get(), f);
      });
    }
    // Only now: forked before there is a server, ranks inherit neither its sockets nor a process
    // that has threads.
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
    ::raise(outcome.interrupted);  // what the program wants to do about it, it does now
    throw Error("spawn", "ended by signal " + std::to_string(outcome.interrupted),
                "all ranks were ended");
  }
  if (!outcome.first) return;
  const RankEnd& end = *outcome.first;
  if (end.failure) throw named_error(*end.failure, end.rank);
  throw Error("spawn", "the rank ended too early: " + end.status.text(),
              "look at what it printed, and at core dumps", end.rank);
}

/// The same with a number of ranks that the compiler knows: `spawn<4>(f)` as threads,
/// `spawn<4>(AsProcesses{}, f)` as processes.
template <std::size_t Ranks, class How, class F>
  requires std::is_same_v<How, AsThreads> || std::is_same_v<How, AsProcesses>
void spawn(How how, F&& f, std::chrono::milliseconds timeout = default_timeout) {
  static_assert(Ranks > 0, "lockstep: spawn needs at least one rank");
  spawn(how, Ranks, std::forward<F>(f), timeout);
}

template <std::size_t Ranks, class F>
void spawn(F&& f, std::chrono::milliseconds timeout = default_timeout) {
  spawn<Ranks>(AsThreads{}, std::forward<F>(f), timeout);
}

}  // namespace lockstep

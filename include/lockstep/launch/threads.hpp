// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A program's whole `main` where the ranks of its job are threads: many ranks on one GPU.

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/launch/failure.hpp"
#include "lockstep/launch/launch.hpp"
#include "lockstep/launch/one_process.hpp"
#include "lockstep/launch/options.hpp"
#include "lockstep/launch/outcome.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/launch/self_launch.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/launch/supervisor.hpp"

namespace lockstep {

namespace detail {

/// How the threads of a job end, told by each as it does.
class ThreadEnds {
 public:
  explicit ThreadEnds(std::size_t threads) : running_(threads) {}

  void returned(int status) {
    const std::lock_guard lock(mutex_);
    if (status_ == 0) status_ = status;
  }
  void threw(Rank rank, const std::exception_ptr& thrown) {
    const std::lock_guard lock(mutex_);
    ends_.push_back({rank, thrown, Failure::of(thrown)});
    changed_.notify_all();
  }
  void ended() {
    const std::lock_guard lock(mutex_);
    --running_;
    changed_.notify_all();
  }

  /// **Host** blocks until all have ended or, once one has failed, for the grace that the others
  /// have. Have all ended?
  bool await(std::chrono::milliseconds grace) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return running_ == 0 || !ends_.empty(); });
    return changed_.wait_for(lock, grace, [&] { return running_ == 0; });
  }

  /// Says which failure was the first, and who failed because of it. Returns the exit status.
  int report(const Descriptor& launcher) {
    const std::lock_guard lock(mutex_);
    if (ends_.empty()) return status_;
    // A rank that fails because of another is often done with it sooner.
    std::size_t first = 0;
    while (first < ends_.size() && ends_[first].failure.consequence) ++first;
    if (first == ends_.size()) first = 0;
    Outcome outcome;
    for (std::size_t i = 0; i < ends_.size(); ++i) {
      const RankEnd end{ends_[i].rank, ExitStatus{1, 0}, ends_[i].failure};
      if (i == first) outcome.first = end;
      if (i != first && end.is_consequence()) outcome.consequences.push_back(end);
    }
    const int status = report_failure(ends_[first].thrown, ends_[first].rank, launcher);
    write_all(2, summary(outcome));
    return status;
  }

 private:
  struct End {
    Rank rank;
    std::exception_ptr thrown;
    Failure failure;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t running_;
  std::vector<End> ends_;  // in the order in which they were told
  int status_ = 0;
};

/// Starts a thread for each of `ranks`, from `first` on. `act(rank)` is what it does; `failed()` is
/// called after one that throws.
template <class Act, class Failed>
std::vector<std::thread> start_threads(std::size_t first, std::size_t ranks, ThreadEnds& ends,
                                       const Act& act, const Failed& failed) {
  const auto threw = [&ends, &failed](Rank rank) {
    ends.threw(rank, std::current_exception());
    failed();
  };
  std::vector<std::thread> threads;
  threads.reserve(ranks);
  for (std::size_t r = first; r < first + ranks; ++r) {
    try {
      threads.emplace_back([rank = Rank{r}, &ends, &act, threw] {
        try {
          act(rank);
        } catch (...) {
          threw(rank);
        }
        ends.ended();
      });
    } catch (...) {  // the system has no more threads
      threw(Rank{r});
      for (; r < first + ranks; ++r) ends.ended();
    }
  }
  return threads;
}

/// Calls `f(session)`, and notes what it returns.
template <class F>
void act_on(Session& session, ThreadEnds& ends, F& f) {
  if constexpr (std::is_void_v<std::invoke_result_t<F&, Session&>>) {
    f(session);
  } else {
    ends.returned(static_cast<int>(f(session)));
  }
}

/// All ranks of a job are threads of this process: calls `f(session)` on each and waits for them.
template <class F>
int run_threads(std::size_t ranks, std::chrono::milliseconds timeout,
                const std::vector<std::string>& arguments, const Descriptor& launcher, F& f) {
  const std::string secret = random_id();
  const std::string job = random_id();
  StoreServer server(secret);
  // Connected before any rank runs: who comes to a store that has been closed would wait for it.
  std::vector<Session> sessions;
  sessions.reserve(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    Membership member{Rank{r}, WorldSize{ranks}, r,       ranks, "127.0.0.1", server.port(),
                      job,     secret,           timeout, ranks};
    sessions.emplace_back(std::move(member), Store("127.0.0.1", server.port(), secret, timeout));
    sessions.back().set_arguments(arguments);
  }
  ThreadEnds ends(ranks);
  const auto act = [&](Rank rank) { act_on(sessions[rank.value()], ends, f); };
  // Whoever waits for this rank in the store stops waiting.
  const auto failed = [&] { server.shut_down(); };
  for (std::thread& thread : start_threads(0, ranks, ends, act, failed)) thread.join();
  return ends.report(launcher);
}

/// This process is one of several, with as many threads each: calls `f(session)` on its own. When
/// one has failed the others have a while to fail because of it; who then still waits for other
/// processes is left, and the process ends.
template <class F>
int run_threads_at(RankPlacement place, std::size_t threads, std::chrono::milliseconds timeout,
                   const std::vector<std::string>& arguments, const Descriptor& launcher, F& f) {
  const std::string host = place.host;
  const std::unique_ptr<StoreServer> server = settle_at(place);
  const std::size_t first = place.rank.value() * threads;
  ThreadEnds ends(threads);
  const auto act = [&](Rank rank) {
    const std::size_t local = place.local_rank * threads + rank.value() - first;
    Session session = meet_at(
        place, {rank, WorldSize{place.world.value() * threads}, local, place.local_world * threads,
                host, 0, place.job, place.secret, timeout, threads});
    session.set_arguments(arguments);
    act_on(session, ends, f);
  };
  const auto failed = [] {};
  std::vector<std::thread> running = start_threads(first, threads, ends, act, failed);
  if (!ends.await(termination_grace())) {
    const int status = ends.report(launcher);
    std::fflush(nullptr);
    ::_exit(status);
  }
  for (std::thread& thread : running) thread.join();
  const int status = ends.report(launcher);
  if (status == 0 && server) server->wait_until_unused(Deadline::after(timeout));
  return status;
}

/// How many ranks are threads of a process that others are started beside.
inline std::size_t threads_of(const RankPlacement& place, const LaunchOptions& options,
                              std::size_t default_ranks) {
  if (const auto told = environment().threads()) return *told;
  if (options.ranks) return *options.ranks;
  if (default_ranks == dynamic) return 1;
  if (default_ranks % place.world.value() == 0) return default_ranks / place.world.value();
  throw Error("launch",
              "a world of " + std::to_string(default_ranks) + " ranks cannot be divided among " +
                  std::to_string(place.world.value()) + " processes",
              "start another number of processes", place.rank);
}

}  // namespace detail

/// Can the threads of several processes be the ranks of one job?
enum class Processes : std::uint8_t { one, many };

/// `int main(int argc, char** argv) { return launch_threads(argc, argv, [](Session& session) {
/// ... }); }`
///
/// Runs `--ranks N` ranks, `default_ranks` without it, as threads of this process, all on the same
/// `f`. What `f` throws on one rank is printed with the rank's number; the others' calls then fail,
/// and when all have ended the exit status is 1. Otherwise it is what `f` returns, 0 for void, and
/// of several the first that is not 0.
///
/// With `Processes::many` there may be several such processes, one on each host: `--nodes`,
/// `--node-rank` and `--rendezvous` start them (each in a process of its own, which this one looks
/// after), or torchrun, mpirun or srun, one on each host. Rank = process * `--ranks` + thread.
/// **Ranks** this process is all of them, or `--ranks` of them. **Host** blocks until all have
/// ended. **Stream** none.
template <class F>
int launch_threads(int argc, char** argv, F&& f, std::size_t default_ranks = dynamic,
                   Processes processes = Processes::one) {
  Descriptor launcher;
  try {
    LaunchOptions options = parse_options(argc, argv);
    const auto place = environment(options.rendezvous).placement();
    const auto timeout =
        options.timeout.value_or(environment().timeout().value_or(default_timeout));
    if (place) launcher = inherited_pipe(place->report_fd);
    if (processes == Processes::many) {
      if (place && (place->hosted || place->world > WorldSize{1})) {
        // Through a pipe stdio would keep lines back until a block is full.
        if (place->hosted) std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
        return detail::run_threads_at(*place, detail::threads_of(*place, options, default_ranks),
                                      timeout, options.rest, launcher, f);
      }
      if (options.nodes > 1) {
        options.threads = options.ranks.value_or(1);
        return launch_ranks(std::move(options), timeout);
      }
    }
    require_one_process(options, place, {"ranks", "Backend<Nccl>"});
    const std::size_t ranks = options.ranks.value_or(default_ranks == dynamic ? 1 : default_ranks);
    return detail::run_threads(ranks, timeout, options.rest, launcher, f);
  } catch (...) {
    return report_failure(std::current_exception(), std::nullopt, launcher);
  }
}

}  // namespace lockstep

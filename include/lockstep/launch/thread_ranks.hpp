// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks that are threads, as several ranks on one GPU are. They run the program's own code
/// and take signals as its other threads do.

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/launch/failure.hpp"
#include "lockstep/launch/grace.hpp"
#include "lockstep/launch/meeting.hpp"
#include "lockstep/launch/outcome.hpp"

namespace lockstep::detail {

/// Says that this rank was asked to stop and has saved its state; rank 0 speaks for all. Returns
/// the exit status.
inline int report_stop(const Stopped& stopped, std::optional<Rank> rank) {
  std::fflush(nullptr);
  if (rank.value_or(Rank{0}) == Rank{0}) std::fputs(text({stopped.what(), "\n"}).c_str(), stderr);
  return stopped_status;
}

/// Reports why this rank fails: to lockstep's launcher through its pipe, else on stderr, in one
/// piece. Returns the exit status, 1; or that of a rank that was asked to stop.
inline int report_failure(const std::exception_ptr& thrown, std::optional<Rank> rank,
                          const Descriptor& launcher) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Stopped& stopped) {
    return report_stop(stopped, rank);
  } catch (...) {  // NOLINT(bugprone-empty-catch): a failure, which is reported below
  }
  Failure failure = Failure::of(thrown);
  if (!failure.rank) failure.rank = rank;  // of a process with several, the launcher knows one
  std::fflush(nullptr);
  if (!launcher || !write_all(launcher.get(), failure.bytes())) {
    std::fputs(text({failure.text(rank), "\n"}).c_str(), stderr);
  }
  return 1;
}

/// Calls `run()`, which returns an exit status. A stop ends it while the session is still there:
/// other ranks, which stop as well, may need its store a little longer.
inline int until_stopped(std::optional<Rank> rank, FunctionRef<int()> run) {
  try {
    return run();
  } catch (const Stopped& stopped) {
    return report_stop(stopped, rank);
  }
}

/// Calls `run(session)`, until it is stopped. Where it ends well, nothing of the command line may
/// be left that nobody has read.
inline int run_rank(Session& session, FunctionRef<int(Session&)> run) {
  return until_stopped(session.rank(), [&] {
    const int status = run(session);
    if (status == 0) session.options().close();
    return status;
  });
}

/// How the threads of a job ended, as each reports it.
class ThreadEnds {
 public:
  explicit ThreadEnds(std::size_t threads) : running_(threads) {}

  /// The first status that is not 0 counts, and a failure's before that of a stop.
  void returned(int status) {
    const std::lock_guard lock(mutex_);
    if (status_ == 0 || (status_ == stopped_status && status != 0)) status_ = status;
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

  /// **Host** blocks until all have ended or, once one has failed, for the grace of the others.
  /// Returns whether all have ended.
  bool await(std::chrono::milliseconds grace) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return running_ == 0 || !ends_.empty(); });
    return changed_.wait_for(lock, grace, [&] { return running_ == 0; });
  }

  /// Says which failure was the first, and which ranks failed because of it. Returns the exit
  /// status.
  int report(const Descriptor& launcher) {
    const std::lock_guard lock(mutex_);
    if (ends_.empty()) return status_;
    // A rank that fails because of another often ends before it.
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

/// Starts a thread for each of `ranks`, from `first` on. Each calls `act(rank)`, which returns its
/// exit status; `failed()` is called after one that throws. Both must outlive the threads.
inline std::vector<Thread> start_threads(std::size_t first, std::size_t ranks, ThreadEnds& ends,
                                         FunctionRef<int(Rank)> act, FunctionRef<void()> failed) {
  std::vector<Thread> threads;
  threads.reserve(ranks);
  for (std::size_t r = first; r < first + ranks; ++r) {
    const auto threw = [rank = Rank{r}, &ends, failed](const std::exception_ptr& thrown) {
      ends.threw(rank, thrown);
      failed();
      ends.ended();
    };
    const auto run = [rank = Rank{r}, &ends, act] {
      ends.returned(act(rank));
      ends.ended();
    };
    try {
      threads.emplace_back(ThreadName{"lockstep rank", "the thread of a rank"}, run, threw,
                           Signals::delivered);
    } catch (...) {  // the system has no more threads
      ends.threw(Rank{r}, std::current_exception());
      failed();
      for (; r < first + ranks; ++r) ends.ended();
    }
  }
  return threads;
}

/// All ranks of a job are threads of this process: calls `run(session)` on each and waits for them.
/// With `asks_for_help` it runs only to learn what options it asks for.
inline int run_threads(std::size_t ranks, std::chrono::milliseconds timeout,
                       const std::vector<std::string>& arguments, const Descriptor& launcher,
                       FunctionRef<int(Session&)> run, bool asks_for_help = false) {
  const std::string secret = random_id();
  const std::string job = random_id();
  allow_open_files(3 * ranks + 64, "a process of", ranks);
  StoreServer server(secret);
  // Connected before any rank runs: a rank that comes to a closed store would wait for it.
  std::vector<Session> sessions;
  sessions.reserve(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    Membership member{Rank{r}, WorldSize{ranks}, r,       ranks, "127.0.0.1", server.port(),
                      job,     secret,           timeout, ranks};
    sessions.emplace_back(std::move(member), Store("127.0.0.1", server.port(), secret, timeout));
    sessions.back().set_arguments(arguments, asks_for_help);
  }
  ThreadEnds ends(ranks);
  const auto act = [&](Rank rank) { return run_rank(sessions[rank.value()], run); };
  // Ranks that wait for this one in the store stop waiting.
  const auto failed = [&] { server.shut_down(); };
  for (Thread& thread : start_threads(0, ranks, ends, act, failed)) thread.join();
  return ends.report(launcher);
}

/// This process is one of several, with as many threads each: calls `run(session)` on its own. When
/// one has failed the others have a while to end; then the process ends, even if a thread still
/// waits for other processes.
inline int run_threads_at(RankPlacement place, std::size_t threads,
                          std::chrono::milliseconds timeout,
                          const std::vector<std::string>& arguments, const Descriptor& launcher,
                          FunctionRef<int(Session&)> run) {
  const std::string name = place.host;
  place.threads = threads;
  const std::unique_ptr<StoreHost> host = settle_at(place);
  const std::size_t first = place.rank.value() * threads;
  ThreadEnds ends(threads);
  const auto act = [&](Rank rank) {
    const std::size_t local = place.local_rank * threads + rank.value() - first;
    Session session = meet_at(
        place, {rank, WorldSize{place.world.value() * threads}, local, place.local_world * threads,
                name, 0, place.job, place.secret, timeout, threads});
    session.set_arguments(arguments);
    return run_rank(session, run);
  };
  const auto failed = [] {};
  std::vector<Thread> running = start_threads(first, threads, ends, act, failed);
  if (!ends.await(termination_grace(on_request(arguments)))) {
    const int status = ends.report(launcher);
    std::fflush(nullptr);
    ::_exit(status);
  }
  for (Thread& thread : running) thread.join();
  const int status = ends.report(launcher);
  if ((status == 0 || status == stopped_status) && host)
    host->server.wait_until_unused(Deadline::after(timeout));
  return status;
}

}  // namespace lockstep::detail

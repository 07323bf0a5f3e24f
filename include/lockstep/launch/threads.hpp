// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A program's whole `main` where the ranks of its job are threads: many ranks on one GPU.

#include <cstddef>
#include <exception>
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
#include "lockstep/launch/store.hpp"

namespace lockstep {

namespace detail {

/// How the threads of a job end, told by each as it does.
class ThreadEnds {
 public:
  void returned(int status) {
    const std::lock_guard lock(mutex_);
    if (status_ == 0) status_ = status;
  }

  /// Whoever waits for this rank in the store stops waiting.
  void threw(Rank rank, const std::exception_ptr& thrown, StoreServer& server) {
    const std::lock_guard lock(mutex_);
    ends_.push_back({rank, thrown, Failure::of(thrown)});
    server.shut_down();
  }

  /// Says which failure was the first, and who failed because of it. Returns the exit status.
  int report(const Descriptor& launcher) const {
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
  std::vector<End> ends_;  // in the order in which they were told
  int status_ = 0;
};

/// Calls `f(session)` on `ranks` threads and waits for all of them.
template <class F>
int run_threads(std::size_t ranks, std::chrono::milliseconds timeout,
                const std::vector<std::string>& arguments, const Descriptor& launcher, F& f) {
  const std::string secret = random_id();
  const std::string job = random_id();
  StoreServer server(secret);
  ThreadEnds ends;
  // Connected before any rank runs: who comes to a store that has been closed would wait for it.
  std::vector<Session> sessions;
  sessions.reserve(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    Membership member{Rank{r}, WorldSize{ranks}, r,      ranks, "127.0.0.1", server.port(),
                      job,     secret,           timeout};
    sessions.emplace_back(std::move(member), Store("127.0.0.1", server.port(), secret, timeout));
    sessions.back().set_arguments(arguments);
  }
  const auto run = [&](Rank rank) {
    try {
      Session& session = sessions[rank.value()];
      if constexpr (std::is_void_v<std::invoke_result_t<F&, Session&>>) {
        f(session);
      } else {
        ends.returned(static_cast<int>(f(session)));
      }
    } catch (...) {
      ends.threw(rank, std::current_exception(), server);
    }
  };
  {
    std::vector<std::jthread> threads;
    threads.reserve(ranks);
    for (std::size_t r = 0; r < ranks; ++r) {
      try {
        threads.emplace_back(run, Rank{r});
      } catch (...) {  // the system has no more threads
        ends.threw(Rank{r}, std::current_exception(), server);
        break;
      }
    }
  }
  return ends.report(launcher);
}

}  // namespace detail

/// `int main(int argc, char** argv) { return launch_threads(argc, argv, [](Session& session) {
/// ... }); }`
///
/// Runs `--ranks N` ranks, `default_ranks` without it, as threads of this process, all on the same
/// `f`. What `f` throws on one rank is printed with the rank's number; the others' calls then fail,
/// and when all have ended the exit status is 1. Otherwise it is what `f` returns, 0 for void, and
/// of several the first that is not 0.
/// **Ranks** this process is all of them. **Host** blocks until all have ended. **Stream** none.
template <class F>
int launch_threads(int argc, char** argv, F&& f, std::size_t default_ranks = dynamic) {
  Descriptor launcher;
  try {
    const LaunchOptions options = parse_options(argc, argv);
    const auto place = environment(options.rendezvous).placement();
    if (place) launcher = inherited_pipe(place->report_fd);
    require_one_process(options, place, {"ranks", "Backend<Nccl>"});
    const auto timeout =
        options.timeout.value_or(environment().timeout().value_or(default_timeout));
    const std::size_t ranks = options.ranks.value_or(default_ranks == dynamic ? 1 : default_ranks);
    return detail::run_threads(ranks, timeout, options.rest, launcher, f);
  } catch (...) {
    return report_failure(std::current_exception(), std::nullopt, launcher);
  }
}

}  // namespace lockstep

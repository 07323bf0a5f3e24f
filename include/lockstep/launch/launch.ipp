// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `launch.hpp`.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/terminal.hpp"
#include "lockstep/launch/environment.hpp"
#include "lockstep/launch/launch.hpp"
#include "lockstep/launch/launch_count.hpp"
#include "lockstep/launch/meeting.hpp"
#include "lockstep/launch/options.hpp"
#include "lockstep/launch/program_options.hpp"
#include "lockstep/launch/self_launch.hpp"
#include "lockstep/launch/shared_gpus.hpp"
#include "lockstep/launch/thread_ranks.hpp"
#include "lockstep/version.hpp"

namespace lockstep::detail {

/// The start of a process: the launcher's options, and its place in a job if it has one.
struct Start {
  LaunchCount count;
  LaunchOptions options;
  std::optional<RankPlacement> place;
  std::chrono::milliseconds timeout{};
  bool is_answered = false;

  /// `run` is the program, which knows its own options; `ranks` are as many as it must have.
  Start(int argc, char** argv, std::span<const Flag> flags, FunctionRef<int(Session&)> run,
        std::size_t ranks) {
    // Jobs that a program makes of its session have options too.
    if (flags.empty()) flags = ProgramTraits::get().flags;
    if (answer(argc, argv, flags, run, ranks == dynamic ? 1 : ranks)) return;
    options = parse_options(argc, argv, flags);
    options.launch_number = count.number();
    set_progress_style(options.progress);
    progress_style();  // or an error, before any rank
    place = environment(options.rendezvous).placement();
    require_local_rank();
    require_restarts();
    timeout = options.timeout.value_or(environment().timeout().value_or(default_timeout));
    if (place) SharedGpuVariables::add_to_this_process(*place);
    // Through a pipe, stdio would keep lines back until a block is full. The user would see them
    // late, and those before a crash never.
    if (place && place->hosted) std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  }

  /// Is there nothing to do? So it is once a question is answered, and where lockstep's launcher
  /// started this rank for another call of `launch` in this program.
  bool is_over() const {
    return is_answered || environment().launch_number().value_or(count.number()) != count.number();
  }

  /// Was this process started by itself, or as a single task inside an allocation? Then it may
  /// start ranks.
  bool is_alone() const { return !place || (place->world == WorldSize{1} && !place->hosted); }

  /// The pipe to lockstep's launcher, where that has started this process.
  Descriptor report() const { return place ? inherited_pipe(place->report_fd) : Descriptor(); }

  Session session() {
    Session session = place ? join_at(*place, timeout) : join_alone(timeout);
    session.set_arguments(options.rest);
    return session;
  }

 private:
  /// Answers `--help` and `--version`, once: rank 0 of those that a launcher has started prints.
  bool answer(int argc, char** argv, std::span<const Flag> flags, FunctionRef<int(Session&)> run,
              std::size_t ranks) {
    const std::vector<std::string_view> arguments(argv, argv + argc);
    const bool wants_help = asks_for(arguments, "--help");
    is_answered = wants_help || asks_for(arguments, "--version");
    if (!is_answered || count.number() != 1) return is_answered;
    // A place without a meeting point is an error for a rank, but this one meets nobody.
    const auto where = environment(Endpoint{"127.0.0.1", 1}).placement();
    if (where && where->rank != Rank{0}) return true;
    std::fputs(wants_help ? help(arguments, flags, run, ranks).c_str()
                          : text({"lockstep ", version, "\n"}).c_str(),
               stdout);
    std::fflush(stdout);
    return true;
  }

  /// The answer to `--help`. A program that has options of its own is run, on threads of this
  /// process, until it has asked for them; `HelpAsked` ends it then.
  static std::string help(std::span<const std::string_view> arguments, std::span<const Flag> flags,
                          FunctionRef<int(Session&)> run, std::size_t ranks) {
    const std::string_view program = arguments.empty() ? "program" : arguments[0];
    std::vector<ProgramOptions::Asked> asked;
    std::string note;
    if (!ProgramTraits::get().has_options) return help_text(program, flags, asked);
    const auto until_asked = [&](Session& session) {
      try {
        run(session);
      } catch (const HelpAsked&) {  // NOLINT(bugprone-empty-catch): this is its end
      } catch (const std::exception& error) {
        if (session.rank() == Rank{0}) {
          note = text({"It may have more, but ended before it had asked for them: ", error.what()});
        }
      } catch (...) {  // NOLINT(bugprone-empty-catch): nor is any other failure one of `--help`
      }
      if (session.rank() == Rank{0}) asked = session.options().asked();
      return 1;  // so that nobody asks who has read the rest
    };
    std::vector<std::string> words{std::string(program)};
    try {
      std::vector<Flag> all(flags.begin(), flags.end());
      all.insert(all.end(), std::begin(launch_flags), std::end(launch_flags));
      words = cut_arguments(arguments, all).rest;
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): a slip beside `--help` is none
    }
    try {
      run_threads(ranks, std::chrono::seconds(10), words, Descriptor(), until_asked, true);
    } catch (const std::exception& error) {
      note = error.what();
    }
    return help_text(program, flags, asked, note);
  }

  /// Only a launcher of lockstep's own can start ranks again.
  void require_restarts() const {
    if (options.max_restarts == 0 || !place || is_alone()) return;
    fail("launch", {"--max-restarts was given to a rank that ", place->launcher, " started"},
         place->launcher == "torchrun"
             ? "give it to torchrun itself, before the program's name"
             : "leave it out, or let lockstep start the ranks, with --ranks",
         place->rank);
  }

  /// Older launchers pass the local rank as an argument too. One that contradicts the environment
  /// would put a rank on another's device.
  void require_local_rank() const {
    if (!options.local_rank || !place) return;
    const bool is_known = place->local_world != 0 || std::getenv("LOCAL_RANK") != nullptr;
    if (!is_known || *options.local_rank == place->local_rank) return;
    fail("launch",
         {"--local_rank is ", *options.local_rank, " and ", place->launcher, " gives local rank ",
          place->local_rank},
         "leave --local_rank out", place->rank);
  }
};

/// Throws if several processes were started for a job of one process. `threads` is the word for the
/// job's threads in errors.
LOCKSTEP_INLINE void require_one_process(const Start& start, std::string_view threads) {
  if (!start.place || start.place->world == WorldSize{1}) return;
  const RankPlacement& place = *start.place;
  fail("launch",
       {place.launcher, " started this process as one of ", place.world, " ranks, and the ",
        threads, " of this job are threads of one process"},
       text({"start it once, with --ranks ", place.world}), place.rank);
}

/// The exit status of ranks that have returned: 1 where a failure came too late to be thrown. It is
/// reported as one that was.
LOCKSTEP_INLINE int status_after(int status, LateFailures& late, const Descriptor& launcher) {
  if (status != 0) return status;
  const std::optional<LateFailure> failure = late.take();
  return failure ? report_failure(failure->thrown, failure->rank, launcher) : status;
}

LOCKSTEP_INLINE int launch_processes(int argc, char** argv, FunctionRef<int(Session&)> run,
                                     std::size_t default_ranks, std::span<const Flag> flags) {
  std::optional<Rank> rank;
  Descriptor launcher;
  LateFailures late;
  try {
    Start start(argc, argv, flags, run, default_ranks);
    if (start.is_over()) return 0;
    const auto& place = start.place;
    if (!start.options.ranks && !place && default_ranks != dynamic && default_ranks > 1) {
      start.options.ranks = default_ranks;
    }
    if (start.options.max_restarts != 0 && !start.options.ranks) start.options.ranks = 1;
    if (start.options.ranks) {
      if (!place || start.is_alone()) return launch_ranks(std::move(start.options), start.timeout);
      fail("launch", {"--ranks was given to a rank that ", place->launcher, " started"},
           "leave the number of ranks to one of the two", place->rank);
    }
    rank = place ? place->rank : Rank{0};
    launcher = start.report();
    Session session = start.session();
    const int status = run_rank(session, run);
    return status_after(status, late, launcher);
  } catch (...) {
    return report_failure(std::current_exception(), rank, launcher);
  }
}

LOCKSTEP_INLINE int launch_alone(int argc, char** argv,
                                 FunctionRef<int(Session&, std::optional<std::size_t>)> run,
                                 std::span<const Flag> flags) {
  Descriptor launcher;
  LateFailures late;
  try {
    std::optional<std::size_t> replicas;
    const auto run_replicas = [&](Session& session) { return run(session, replicas); };
    Start start(argc, argv, flags, run_replicas, 1);
    if (start.is_over()) return 0;
    launcher = start.report();
    require_one_process(start, "replicas");
    LaunchOptions& options = start.options;
    if (options.max_restarts != 0) {
      options.threads = options.ranks;
      return launch_ranks(std::move(options), start.timeout);
    }
    replicas = options.ranks ? options.ranks : environment().threads();
    Session session = start.session();
    const int status = run_rank(session, run_replicas);
    return status_after(status, late, launcher);
  } catch (...) {
    return report_failure(std::current_exception(), std::nullopt, launcher);
  }
}

/// How many ranks are threads of a process that others are started beside.
LOCKSTEP_INLINE std::size_t threads_of(const RankPlacement& place, const LaunchOptions& options,
                                       std::size_t default_ranks) {
  if (const auto told = environment().threads()) return *told;
  if (options.ranks) return *options.ranks;
  if (default_ranks == dynamic) return 1;
  const std::size_t processes = place.world.value();
  if (default_ranks % processes == 0) return default_ranks / processes;
  fail("launch",
       {"a world of ", default_ranks, " ranks cannot be divided among ", processes, " processes"},
       "start another number of processes", place.rank);
}

LOCKSTEP_INLINE int launch_threads(int argc, char** argv, FunctionRef<int(Session&)> run,
                                   std::size_t default_ranks, Processes processes,
                                   std::span<const Flag> flags) {
  Descriptor launcher;
  LateFailures late;
  try {
    Start start(argc, argv, flags, run, default_ranks);
    if (start.is_over()) return 0;
    LaunchOptions& options = start.options;
    launcher = start.report();
    if (processes == Processes::many && start.place &&
        (start.place->hosted || start.place->world > WorldSize{1})) {
      const std::size_t threads = threads_of(*start.place, options, default_ranks);
      return status_after(
          run_threads_at(*start.place, threads, start.timeout, options.rest, launcher, run), late,
          launcher);
    }
    require_one_process(start, "ranks");
    const std::size_t by_default = default_ranks == dynamic ? 1 : default_ranks;
    const std::size_t ranks = options.ranks.value_or(environment().threads().value_or(by_default));
    if (options.max_restarts != 0) {
      // Threads share a process that may have died: a launcher of its own starts it again.
      options.threads = options.ranks = ranks;
      return launch_ranks(std::move(options), start.timeout);
    }
    return status_after(run_threads(ranks, start.timeout, options.rest, launcher, run), late,
                        launcher);
  } catch (...) {
    return report_failure(std::current_exception(), std::nullopt, launcher);
  }
}

}  // namespace lockstep::detail

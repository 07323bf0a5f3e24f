// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Starting ranks. `launch` is a program's whole `main`: be a rank, start ranks, or run
/// alone; `spawn<N>(f)` is a job inside a program. Ranks are processes, or threads of one process.

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/launch/program_options.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep {

namespace detail {

using RankFunction = FunctionRef<void(const Membership&, Store&)>;

void spawn_threads(std::size_t ranks, RankFunction f, std::chrono::milliseconds timeout);
void spawn_processes(std::size_t ranks, RankFunction f, std::chrono::milliseconds timeout);

/// 0 in a job that was started once. Launchers count for themselves: lockstep's (LOCKSTEP_RESTART),
/// torchrun (TORCHELASTIC_RESTART_COUNT) and Slurm, whose batch jobs are requeued
/// (SLURM_RESTART_COUNT). One may have started another, so their counts are added.
std::size_t restart_count();

/// What the ranks of a program are: processes; threads of this one; threads of each of several
/// processes; or replicas that the job makes of its only rank.
enum class RanksAs : std::uint8_t { processes, threads, threads_of_processes, replicas };

/// The `main` of a program. `run(session, replicas)` is called for each rank of this process; with
/// replicas, it gets the number that the user wants. Options that the job behind `run` takes are in
/// `flags`: they are left for it.
int launch_as(RanksAs how, int argc, char** argv,
              FunctionRef<int(Session&, std::optional<std::size_t>)> run, std::size_t default_ranks,
              std::span<const Flag> flags = {});

/// `f` as a function that returns an exit status: 0 where it returns nothing.
template <class F>
auto returning_status(F& f) {
  return [&f](Session& session, std::optional<std::size_t>) -> int {
    if constexpr (std::is_void_v<std::invoke_result_t<F&, Session&>>) {
      f(session);
      return 0;
    } else {
      return static_cast<int>(f(session));
    }
  };
}

}  // namespace detail

/// Ranks are threads of this process, as several ranks on one GPU must be.
struct AsThreads {};

/// Ranks are forked copies of this process, which carry on from the call of `spawn`.
struct AsProcesses {};

/// Runs `f(const Membership&, Store&)` on `ranks` threads, all on the same `f`. When one throws,
/// the store is closed, so that the others do not wait for it in vain; the first exception is
/// thrown here once all have returned.
template <class F>
void spawn(AsThreads, std::size_t ranks, F&& f,
           std::chrono::milliseconds timeout = default_timeout) {
  detail::spawn_threads(ranks, f, timeout);
}

/// Runs `f(const Membership&, Store&)` in `ranks` forked processes, supervised as launched ones
/// are: output prefixed, the first failure ends the rest and is thrown here. Call it while no other
/// thread runs, like fork itself.
template <class F>
void spawn(AsProcesses, std::size_t ranks, F&& f,
           std::chrono::milliseconds timeout = default_timeout) {
  detail::spawn_processes(ranks, f, timeout);
}

/// Runs a number of ranks that the compiler knows: `spawn<4>(f)` as threads,
/// `spawn<4>(AsProcesses{}, f)` as processes.
template <std::size_t Ranks, class How, class F>
  requires std::same_as<How, AsThreads> || std::same_as<How, AsProcesses>
void spawn(How how, F&& f, std::chrono::milliseconds timeout = default_timeout) {
  static_assert(Ranks > 0, "lockstep: spawn needs at least one rank");
  spawn(how, Ranks, std::forward<F>(f), timeout);
}

template <std::size_t Ranks, class F>
void spawn(F&& f, std::chrono::milliseconds timeout = default_timeout) {
  spawn<Ranks>(AsThreads{}, std::forward<F>(f), timeout);
}

/// Can a job whose ranks are threads have several processes?
enum class Processes : std::uint8_t { one, many };

/// `int main(int argc, char** argv) { return launch(argc, argv, [](Session& session) { ... }); }`
///
/// Started by a launcher (lockstep's, torchrun, mpirun, srun), the process is a rank: it joins and
/// calls `f(session)`. Started with `--ranks N` it launches N ranks of itself. Otherwise it is a
/// world of one. The exit status is what `f` returns (0 for void), 1 after an exception, which is
/// printed with the rank's number, or the launcher's.
/// With `default_ranks` it launches that many where neither a launcher nor `--ranks` says how many.
/// With `--help` or `--version` it prints what is asked for and returns 0, without any rank.
/// Ranks: all call it, being their `main`. Host: blocks until all have joined, then runs `f`.
/// Stream: none.
template <class F>
int launch(int argc, char** argv, F&& f, std::size_t default_ranks = dynamic) {
  return detail::launch_as(detail::RanksAs::processes, argc, argv, detail::returning_status(f),
                           default_ranks);
}

/// `int main(int argc, char** argv) { return launch_threads(argc, argv, [](Session& session) {
/// ... }); }`
///
/// Runs `--ranks N` ranks, `default_ranks` without it, as threads of this process, all on the same
/// `f`. An exception of `f` on one rank is printed with the rank's number; the other ranks' calls
/// then fail, and when all have ended the exit status is 1. Otherwise it is the first result of `f`
/// that is not 0; void counts as 0.
///
/// With `Processes::many` there may be several such processes, one on each host, which torchrun,
/// mpirun or srun starts. Rank = process * `--ranks` + thread.
/// **Ranks** this process is all of them, or `--ranks` of them. **Host** blocks until all have
/// ended. **Stream** none.
template <class F>
int launch_threads(int argc, char** argv, F&& f, std::size_t default_ranks = dynamic,
                   Processes processes = Processes::one) {
  const auto how = processes == Processes::many ? detail::RanksAs::threads_of_processes
                                                : detail::RanksAs::threads;
  return detail::launch_as(how, argc, argv, detail::returning_status(f), default_ranks);
}

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Launching: `launch` is a program's whole `main`, `spawn<N>(f)` runs a job inside one.

#include "lockstep/detail/core/dynamic.hpp"
#include "lockstep/detail/core/utility.hpp"
#include "lockstep/detail/launch/rendezvous.hpp"

namespace lockstep {

namespace detail {

using RankFunction = FunctionRef<void(const Membership&, Store&)>;

void spawn_ranks(bool as_processes, std::size_t ranks, RankFunction f,
                 std::chrono::milliseconds timeout);

/// The restarts of this job, by lockstep, torchrun and Slurm together: launchers may be nested.
std::size_t restart_count();

/// `threads_of_processes`: threads of each of several processes; `replicas`: made by the only rank.
enum class RanksAs : std::uint8_t { processes, threads, threads_of_processes, replicas };

/// The `main` of a program. Calls `run(session, replicas)` for each rank of this process, with the
/// user's number of replicas, if any. `flags` are options left for the job behind `run`.
int launch_as(RanksAs how, int argc, char** argv,
              FunctionRef<int(Session&, std::optional<std::size_t>)> run, std::size_t default_ranks,
              std::span<const Flag> flags = {});

/// `f` as a function that returns an exit status, 0 for void.
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

/// Ranks are threads of this process, as required for several ranks on one GPU.
struct AsThreads {};

/// Ranks are forked copies of this process, which continue from the call of `spawn`.
struct AsProcesses {};

/// Runs `f(const Membership&, Store&)` for each rank. When a thread throws, the store is closed, so
/// that no other rank waits for it, and the first exception is rethrown once all have returned.
/// Processes are supervised like launched ones: the first failure ends all and is thrown here. Like
/// fork, spawn processes while no other thread runs.
template <class How, class F>
  requires std::same_as<How, AsThreads> || std::same_as<How, AsProcesses>
void spawn(How, std::size_t ranks, F&& f, std::chrono::milliseconds timeout = default_timeout) {
  detail::spawn_ranks(std::same_as<How, AsProcesses>, ranks, f, timeout);
}

/// `spawn<4>(f)` runs threads, `spawn<4>(AsProcesses{}, f)` processes.
template <std::size_t Ranks, class How, class F>
  requires std::same_as<How, AsThreads> || std::same_as<How, AsProcesses>
void spawn(How how, F&& f, std::chrono::milliseconds timeout = default_timeout) {
  static_assert(Ranks > 0, "lockstep: spawn needs at least one rank");
  spawn(how, Ranks, f, timeout);
}
template <std::size_t Ranks, class F>
void spawn(F&& f, std::chrono::milliseconds timeout = default_timeout) {
  spawn<Ranks>(AsThreads{}, f, timeout);
}

/// Whether a job whose ranks are threads may have several processes.
enum class Processes : std::uint8_t { one, many };

/// `int main(int argc, char** argv) { return launch(argc, argv, [](Session& session) { ... }); }`
///
/// Started by a launcher (lockstep's, torchrun, mpirun, srun), the process is a rank: it joins and
/// calls `f(session)`. Otherwise it launches `--ranks N` ranks of itself, `default_ranks` without
/// that option, or is a world of one. `--help` and `--version` print and return 0. The exit status
/// is the result of `f` (0 for void), 1 after an exception, which is printed with the rank's
/// number, or the launcher's. **Ranks** all, as their `main`. **Host** blocks until all have
/// joined, then runs `f`. **Stream** none.
template <class F>
int launch(int argc, char** argv, F&& f, std::size_t default_ranks = dynamic) {
  return detail::launch_as(detail::RanksAs::processes, argc, argv, detail::returning_status(f),
                           default_ranks);
}

/// `int main(int argc, char** argv) { return launch_threads(argc, argv, f); }`
///
/// Runs `--ranks N` ranks, `default_ranks` without it, as threads of this process, which share `f`.
/// If `f` throws on a rank, the exception is printed with its number, the other ranks' calls fail,
/// and the exit status is 1; otherwise it is the first result of `f` that is not 0 (void is 0).
/// With `Processes::many`, torchrun, mpirun or srun may start several such processes, one on each
/// host, and rank = process * `--ranks` + thread. **Ranks** this process is all of them, or
/// `--ranks` of them. **Host** blocks until all have ended. **Stream** none.
template <class F>
int launch_threads(int argc, char** argv, F&& f, std::size_t default_ranks = dynamic,
                   Processes processes = Processes::one) {
  const auto how = processes == Processes::many ? detail::RanksAs::threads_of_processes
                                                : detail::RanksAs::threads;
  return detail::launch_as(how, argc, argv, detail::returning_status(f), default_ranks);
}

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `launch<Job>(argc, argv, f)`: a trainer's whole `main`.

#include <cstddef>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/launch/launch.hpp"
#include "lockstep/topology/world.hpp"
#include "lockstep/trainer/options.hpp"
#include "lockstep/trainer/rejected.hpp"

namespace lockstep {

/// Starts or joins the job's ranks as `launch` does, and calls `f(job)` on each. A job of
/// `World<4>` starts four ranks without being told; of `World<dynamic>`, as many as `--ranks` says.
/// With `Device<Cuda>` and `Backend<Shm>` they are threads of this process, with
/// `Backend<Hierarchical<Shm, Nccl>>` threads of a process on each host, else processes. A job of
/// `ParallelStrategy<DP>` is this process alone; its replicas are as many as `World<N>`, `--ranks`
/// or `--replicas` says, or one for each device.
/// **Ranks** all call it, being their `main`. **Host** blocks.
template <class Job, class F>
int launch(int argc, char** argv, F&& f) {
  const auto run = [&](Session& session, std::optional<std::size_t> replicas = std::nullopt) {
    TrainerOptions options = parse_trainer_options(session.arguments());
    if (!options.replicas) options.replicas = replicas;
    Job job(session, {}, std::move(options));
    if constexpr (std::is_void_v<std::invoke_result_t<F, Job&>>) {
      std::forward<F>(f)(job);
      return 0;
    } else {
      return static_cast<int>(std::forward<F>(f)(job));
    }
  };
  constexpr std::size_t ranks = Job::template policy<axes::World>::static_size;
  if constexpr (Job::is_one_process) {
    return detail::launch_one_process(argc, argv, run);
  } else if constexpr (Job::ranks_are_threads) {
    return launch_threads(argc, argv, run, ranks,
                          Job::spans_processes ? Processes::many : Processes::one);
  } else {
    return launch(argc, argv, run, ranks);
  }
}

/// A job that was rejected has its error, and nothing of what the program does with it is looked
/// at.
template <class Job, class F>
  requires detail::is_rejected<Job>
int launch(int, char**, F&&) {
  return 1;
}

}  // namespace lockstep

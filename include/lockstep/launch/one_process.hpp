// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A program's whole `main` where its job is one process, whatever it does with threads.

#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/environment.hpp"
#include "lockstep/launch/launch.hpp"
#include "lockstep/launch/options.hpp"
#include "lockstep/launch/rendezvous.hpp"

namespace lockstep {

/// What errors call the threads of a job, and what there is for several processes.
struct ThreadsOfOneProcess {
  std::string who;
  std::string for_many_processes;
};

/// Throws where several processes were started for a job that is one.
inline void require_one_process(const LaunchOptions& options,
                                const std::optional<RankPlacement>& place,
                                const ThreadsOfOneProcess& threads) {
  const std::string but = ", and the " + threads.who + " of this job are threads of one process";
  if (place && place->world > WorldSize{1}) {
    const std::string world = std::to_string(place->world.value());
    throw Error("launch",
                place->launcher + " started this process as one of " + world + " ranks" + but,
                "start it once, with --ranks " + world, place->rank);
  }
  if (options.nodes > 1) {
    throw Error("launch", "--nodes is " + std::to_string(options.nodes) + but,
                "leave --nodes out, or use " + threads.for_many_processes);
  }
}

/// `int main(int argc, char** argv) { return launch_one_process(argc, argv, [](Session& session,
/// std::optional<std::size_t> replicas) { ... }); }`
///
/// Calls `f` with a world of one and with what `--ranks` says. What it throws is printed, and the
/// exit status is 1; otherwise it is what `f` returns. **Host** runs `f`. **Stream** none.
template <class F>
int launch_one_process(int argc, char** argv, F&& f) {
  Descriptor launcher;
  try {
    LaunchOptions options = parse_options(argc, argv);
    auto place = environment(options.rendezvous).placement();
    if (place) launcher = inherited_pipe(place->report_fd);
    require_one_process(options, place, {"replicas", "ParallelStrategy<DDP>"});
    const auto timeout =
        options.timeout.value_or(environment().timeout().value_or(default_timeout));
    Session session = place ? join(*std::move(place), timeout) : join_alone(timeout);
    session.set_arguments(std::move(options.rest));
    return std::forward<F>(f)(session, options.ranks);
  } catch (...) {
    return report_failure(std::current_exception(), std::nullopt, launcher);
  }
}

}  // namespace lockstep

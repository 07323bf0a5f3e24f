// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The options of the command line that are the launcher's; all others are the program's.

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/terminal.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/launch/flags.hpp"

namespace lockstep::detail {

struct LaunchOptions {
  std::optional<std::size_t> ranks;  // on this host
  /// How many of them are threads of one process: all of them; nothing where each is a process.
  std::optional<std::size_t> threads;
  std::optional<Endpoint> rendezvous;
  std::optional<std::chrono::milliseconds> timeout;
  std::optional<ProgressStyle> progress;
  std::optional<std::size_t> local_rank;
  /// How often all ranks are started again after a failure.
  std::size_t max_restarts = 0;
  /// The number of the `launch` call in its process, from 1.
  std::size_t launch_number = 1;
  /// The program's own, its name first.
  std::vector<std::string> rest;
};

/// Throws at options of other launchers that would start ranks on several hosts.
inline void require_one_host(std::span<const std::string_view> arguments) {
  for (std::size_t i = 1; i < arguments.size() && arguments[i] != "--"; ++i) {
    const std::string name = flag_name(arguments[i]);
    if (name != "--nodes" && name != "--nnodes" && name != "--node-rank") continue;
    fail("launch", {name, " is given, and --ranks starts ranks on this host only"},
         "start a job of several hosts with torchrun, srun or mpirun");
  }
}

/// `job_flags` are options that stay among the rest, for the job.
inline LaunchOptions parse_options(int argc, char** argv, std::span<const Flag> job_flags = {}) {
  LaunchOptions options;
  const std::vector<std::string_view> arguments(argv, argv + argc);
  require_one_host(arguments);
  CutArguments cut = cut_arguments(arguments, launch_flags, job_flags);
  options.rest = std::move(cut.rest);
  for (const auto& [name, value] : cut.given) {
    if (name == "--ranks") options.ranks = parse_number(name, value);
    if (name == "--rendezvous") options.rendezvous = parse_endpoint(name, value);
    if (name == "--timeout") options.timeout = parse_seconds(name, value);
    if (name == "--progress") options.progress = parse_progress(name, value);
    if (name == "--max-restarts") options.max_restarts = parse_number(name, value);
    if (name == "--local-rank") options.local_rank = parse_number("--local_rank", value);
  }
  if (options.ranks == std::size_t{0}) {
    fail("launch", {"--ranks is 0"}, "a job has at least one rank");
  }
  return options;
}

}  // namespace lockstep::detail

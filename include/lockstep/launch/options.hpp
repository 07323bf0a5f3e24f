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
#include "lockstep/launch/flags.hpp"
#include "lockstep/launch/parse.hpp"
#include "lockstep/launch/terminal.hpp"

namespace lockstep::detail {

struct LaunchOptions {
  std::optional<std::size_t> ranks;  // on this host
  /// How many of them are threads of one process: all of them; nothing where each is a process.
  std::optional<std::size_t> threads;
  std::size_t nodes = 1;
  std::size_t node_rank = 0;
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

/// `job_flags` are options that stay among the rest, for the job.
inline LaunchOptions parse_options(int argc, char** argv, std::span<const Flag> job_flags = {}) {
  LaunchOptions options;
  std::optional<std::size_t> nodes;
  std::optional<std::size_t> node_rank;
  const std::vector<std::string_view> arguments(argv, argv + argc);
  CutArguments cut = cut_arguments(arguments, launch_flags, job_flags);
  options.rest = std::move(cut.rest);
  for (const auto& [name, value] : cut.given) {
    if (name == "--ranks") options.ranks = parse_number(name, value);
    if (name == "--nodes") nodes = parse_number(name, value);
    if (name == "--node-rank") node_rank = parse_number(name, value);
    if (name == "--rendezvous") options.rendezvous = parse_endpoint(name, value);
    if (name == "--timeout") options.timeout = parse_seconds(name, value);
    if (name == "--progress") options.progress = parse_progress(name, value);
    if (name == "--max-restarts") options.max_restarts = parse_number(name, value);
    if (name == "--local-rank") options.local_rank = parse_number("--local_rank", value);
  }
  if (options.ranks == std::size_t{0}) {
    fail("launch", {"--ranks is 0"}, "a job has at least one rank");
  }
  options.nodes = nodes.value_or(1);
  options.node_rank = node_rank.value_or(0);
  if ((nodes || node_rank) && !options.ranks) {
    fail("launch", {"--nodes and --node-rank need --ranks"},
         "add --ranks with the number of ranks on each node");
  }
  if (options.node_rank >= options.nodes) {
    fail("launch", {"--node-rank is ", options.node_rank, " and --nodes is ", options.nodes},
         "nodes count from 0 and stay below --nodes");
  }
  if (options.nodes > 1 && !options.rendezvous) {
    fail("launch", {"several nodes and no place to meet"},
         "give all of them the same --rendezvous host:port, where host is node 0");
  }
  return options;
}

}  // namespace lockstep::detail

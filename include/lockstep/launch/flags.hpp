// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Options of the command line: those that lockstep takes, and the arguments that it leaves.

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/terminal.hpp"
#include "lockstep/core/text.hpp"

namespace lockstep::detail {

/// An option that lockstep takes.
struct Flag {
  std::string_view name;   // with its dashes
  std::string_view value;  // the word for its value; empty where it has none
  std::string_view help;
};

/// The options of every launched program.
inline constexpr Flag launch_flags[] = {
    {"--ranks", "N", "ranks on this host; with ParallelStrategy<DP>, replicas in this process"},
    {"--rendezvous", "HOST:PORT",
     "under mpirun and srun: the host of rank 0 and a free port there"},
    {"--timeout", "SECONDS", "how long ranks wait for each other (300); also LOCKSTEP_TIMEOUT"},
    {"--max-restarts", "N", "start all ranks again after a failure, up to N times (0)"},
    {"--progress", "STYLE", "auto, bar, lines or none (auto); also LOCKSTEP_PROGRESS"},
    {"--local-rank", "N", "passed by some launchers; compared with what they say otherwise"},
    {"--help", "", "print this text"},
    {"--version", "", "print the version of lockstep"},
};

/// A command line in its parts.
struct CutArguments {
  struct Given {
    std::string_view name;  // as its flag has it
    std::string_view value;
  };
  std::vector<Given> given;
  std::vector<std::string> rest;  // the program's name first
};

/// Takes `flags` out of a program's arguments: `--ranks 4` and `--ranks=4` alike, and underscores
/// for hyphens. Everything else stays, with `others`, which another part of lockstep takes later,
/// and everything from `--` on. An option that is given twice is an error; so is one that looks
/// like a misspelt option of either list.
CutArguments cut_arguments(std::span<const std::string_view> arguments, std::span<const Flag> flags,
                           std::span<const Flag> others = {});

/// The option that somebody who wrote `name` has meant, or nothing.
std::string_view meant_flag(std::string_view name, std::span<const Flag> flags);

/// Does the program's user ask for `name`, an option without a value?
bool asks_for(std::span<const std::string_view> arguments, std::string_view name);

/// An argument's name as flags are spelt: without a value, and with hyphens.
std::string flag_name(std::string_view argument);

const Flag* find_flag(std::string_view name, std::span<const Flag> flags);

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

/// `job_flags` are options that stay among the rest, for the job.
LaunchOptions parse_options(int argc, char** argv, std::span<const Flag> job_flags = {});

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The options of the command line that are the trainer's.

#include "lockstep/checkpoint/options.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/terminal.hpp"
#include "lockstep/launch/program_options.hpp"

namespace lockstep {

namespace detail {

/// What the command line says about checkpoints, which takes precedence over the program.
struct CheckpointFlags {
  /// `--checkpoint-every`: a number of updates, or a time.
  using Every = std::pair<std::uint64_t, std::chrono::milliseconds>;

  std::optional<std::string> folder{};
  std::optional<Every> every{};
  std::optional<std::size_t> keep{};
  std::optional<std::string> best_by{};
  std::optional<bool> higher_is_better{};
  bool resume = false;

  /// Is any of them given?
  bool any() const { return folder || every || keep || best_by || resume; }

  /// The program's options with these in their place. Throws where there is no folder for them.
  CheckpointOptions over(CheckpointOptions options) const;
};

}  // namespace detail

/// The options of a trainer's command line.
struct TrainerOptions {
  Seed seed{0};     ///< `--seed N`: of initial parameters, of shuffling, of ranks
  std::string log;  ///< `--log FILE`, `--record FILE`: a line of JSON for every epoch, appended
  std::optional<std::size_t> replicas{};    ///< `--replicas N`: of `ParallelStrategy<DP>`
  std::optional<ProgressStyle> progress{};  ///< instead of what `--progress` says
  std::string data{};                  ///< `--data FOLDER`, or "generated": what `job.data()` says
  std::vector<std::string> arguments;  ///< what `parse_trainer_options` has left, its name first
  detail::CheckpointFlags checkpoint{};  ///< `--checkpoint`, `--checkpoint-every`, `--resume`, ...
};

namespace detail {

/// The options of a trainer. Some launchers take `--log` for an abbreviation of their own, so it
/// has a second name.
inline constexpr Flag trainer_flags[] = {
    {"--seed", "N", "of initial parameters, shuffling and ranks (0)"},
    {"--log", "FILE", "append a line of JSON for the run and for every epoch"},
    {"--record", "FILE", "the same as --log, which torchrun takes for its own"},
    {"--replicas", "N", "with ParallelStrategy<DP>, replicas in this process"},
    {"--data", "FOLDER", "where data sets are; generated makes them up"},
    {"--checkpoint", "DIR", "save the job's state in this folder"},
    {"--checkpoint-every", "5m", "how often: 30s, 5m, 1h, or a number of updates (every epoch)"},
    {"--resume", "", "go on from the newest valid checkpoint in the folder, if there is one"},
    {"--keep", "N", "how many of the newest checkpoints stay, or all (3)"},
    {"--best", "SCORE", "keep a copy of the best by this score; wer:lower says which is better"},
};

}  // namespace detail

/// Takes the trainer's options out of a program's arguments. `--log FILE` and `--log=FILE` alike;
/// nothing after `--` is looked at.
TrainerOptions parse_trainer_options(const std::vector<std::string>& arguments);

class Session;

namespace detail {

/// The options of a job that is made of a session: those of the session's command line.
TrainerOptions take_trainer_options(Session& session);

/// Whoever uses this variable says that the program has a job that reads the trainer's options. Its
/// initialiser runs before `main`, so that `--help` and the launcher know them too.
template <class>
inline const bool program_has_job = (ProgramTraits::get().flags = trainer_flags, true);

}  // namespace detail

}  // namespace lockstep

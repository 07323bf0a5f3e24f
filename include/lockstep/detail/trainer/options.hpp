// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The trainer's options on the command line.

#include "lockstep/detail/checkpoint/options.hpp"
#include "lockstep/detail/observe/observers.hpp"

namespace lockstep {

namespace detail {

/// The command line's options for checkpoints, which take precedence over the program's.
struct CheckpointFlags {
  /// `--checkpoint-every`: a number of updates, or a time.
  using Every = std::pair<std::uint64_t, std::chrono::milliseconds>;

  std::optional<std::string> folder{};
  std::optional<Every> every{};
  std::optional<std::size_t> keep{};
  std::optional<std::string> best_by{};
  std::optional<bool> higher_is_better{};
  bool resume = false;

  bool any() const { return folder || every || keep || best_by || resume; }

  /// The program's options with these in their place. Throws if there is no folder.
  CheckpointOptions over(CheckpointOptions options) const;
};

}  // namespace detail

/// The options of a trainer's command line: see `trainer_flags`.
struct TrainerOptions {
  Seed seed{0};                             ///< `--seed N`
  std::string log;                          ///< `--log FILE`, `--record FILE`
  std::optional<std::size_t> replicas{};    ///< `--replicas N`
  std::optional<ProgressStyle> progress{};  ///< overrides `--progress`
  std::string data{};                       ///< `--data FOLDER`, or "generated"
  ObserverPaths observers{};                ///< `--trace FILE`, ...
  double peak_flops = 0;                    ///< `--peak-flops N`: of a rank's device, in a second
  std::vector<std::string> arguments{};     ///< the rest, the program's name first
  detail::CheckpointFlags checkpoint{};  ///< `--checkpoint`, `--checkpoint-every`, `--resume`, ...
};

namespace detail {

/// `--record`: some launchers take `--log` for an abbreviation of their own option.
inline constexpr Flag trainer_flags[] = {
    {"--seed", "N", "of initial parameters, shuffling and ranks (0)"},
    {"--log", "FILE", "append a line of JSON for the run and for every epoch"},
    {"--record", "FILE", "the same as --log, which torchrun takes for its own"},
    {"--replicas", "N", "with ParallelStrategy<DP>, replicas in this process"},
    {"--trace", "FILE", "with Observers<Trace>: what all ranks do and when, for Perfetto"},
    {"--tensorboard", "FOLDER", "with Observers<TensorBoard>: event files, from rank 0"},
    {"--prometheus", "FILE", "with Observers<Prometheus>: metrics as text, from rank 0"},
    {"--peak-flops", "989e12", "of a rank's device in a second: the model's share is shown"},
    {"--data", "FOLDER", "where data sets are; generated makes them up"},
    {"--checkpoint", "DIR", "save the job's state in this folder"},
    {"--checkpoint-every", "5m", "how often: 30s, 5m, 1h, or a number of updates (every epoch)"},
    {"--resume", "", "go on from the newest valid checkpoint in the folder, if there is one"},
    {"--keep", "N", "how many of the newest checkpoints stay, or all (3)"},
    {"--best", "SCORE", "keep a copy of the best by this score; wer:lower says which is better"},
};

}  // namespace detail

/// Takes the trainer's options (`--log FILE`, `--log=FILE`) out of the arguments before `--`.
TrainerOptions parse_trainer_options(const std::vector<std::string>& arguments);

class Session;

namespace detail {

/// The options on the session's command line.
TrainerOptions take_trainer_options(Session& session);

/// Using this variable lets `--help` and the launcher know the trainer's options, before `main`.
template <class>
inline const bool program_has_job = (program_job_flags = trainer_flags, true);

}  // namespace detail

}  // namespace lockstep

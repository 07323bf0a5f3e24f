// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The options of the command line that are the trainer's.

#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/options.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/terminal.hpp"
#include "lockstep/launch/program_options.hpp"

namespace lockstep {

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
    checkpoint_flags[0],
    checkpoint_flags[1],
    checkpoint_flags[2],
    checkpoint_flags[3],
    checkpoint_flags[4],
};
static_assert(std::size(trainer_flags) == 5 + std::size(checkpoint_flags));

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

/// For a job that is made: options are asked for until its first operation. Returns `options`.
TrainerOptions leave_options_to_job(Session& session, TrainerOptions options, const bool& is_noted);

}  // namespace detail

}  // namespace lockstep

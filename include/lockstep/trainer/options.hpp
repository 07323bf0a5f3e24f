// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The options of the command line that are the trainer's.

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep {

/// The options of a trainer's command line.
struct TrainerOptions {
  Seed seed{0};     ///< `--seed N`: of initial parameters, of shuffling, of ranks
  std::string log;  ///< `--log FILE`: a line of JSON for every epoch, appended
  std::optional<std::size_t> replicas{};  ///< `--replicas N`: of `ParallelStrategy<DP>`
  std::string data{};                  ///< `--data FOLDER`, or "generated": what `job.data()` says
  std::vector<std::string> arguments;  ///< the program's own, its name first
};

/// Takes the trainer's options out of a program's arguments. `--log FILE` and `--log=FILE` alike;
/// nothing after `--` is looked at.
TrainerOptions parse_trainer_options(const std::vector<std::string>& arguments);

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/trainer/options.ipp"
#endif

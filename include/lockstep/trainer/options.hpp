// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The options of the command line that are the trainer's.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/parse.hpp"

namespace lockstep {

struct TrainerOptions {
  Seed seed{0};     ///< `--seed N`: of initial parameters, of shuffling, of ranks
  std::string log;  ///< `--log FILE`: a line of JSON for every epoch, appended
  std::optional<std::size_t> replicas{};  ///< `--replicas N`: of `ParallelStrategy<DP>`
  std::vector<std::string> arguments;     ///< the program's own, its name first
};

/// Takes the trainer's options out of a program's arguments. `--log FILE` and `--log=FILE` alike;
/// nothing after `--` is looked at.
inline TrainerOptions parse_trainer_options(const std::vector<std::string>& arguments) {
  TrainerOptions options;
  bool ours = true;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    if (argument == "--") ours = false;
    const std::size_t equals = argument.find('=');
    const std::string_view name = argument.substr(0, equals);
    if (i == 0 || !ours || (name != "--log" && name != "--seed" && name != "--replicas")) {
      options.arguments.emplace_back(argument);
      continue;
    }
    if (equals == std::string_view::npos && ++i == arguments.size()) {
      throw Error("launch", std::string(name) + " has no value", "give it one, as in --seed 1");
    }
    const std::string_view value = equals == std::string_view::npos ? std::string_view(arguments[i])
                                                                    : argument.substr(equals + 1);
    if (name == "--log") {
      options.log = value;
    } else if (name == "--replicas") {
      options.replicas = parse_number(name, value);
    } else {
      options.seed = Seed{parse_number(name, value)};
    }
  }
  return options;
}

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `options.hpp`.

#include <string_view>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/parse.hpp"
#include "lockstep/trainer/options.hpp"

namespace lockstep {

LOCKSTEP_INLINE TrainerOptions parse_trainer_options(const std::vector<std::string>& arguments) {
  const std::vector<std::string_view> words(arguments.begin(), arguments.end());
  detail::CutArguments cut = detail::cut_arguments(words, detail::trainer_flags);
  TrainerOptions options;
  options.arguments = std::move(cut.rest);
  options.checkpoint = detail::parse_checkpoint_flags(cut.given);
  for (const auto& [name, value] : cut.given) {
    if (name == "--seed") options.seed = Seed{detail::parse_number(name, value)};
    if (name == "--replicas") options.replicas = detail::parse_number(name, value);
    if (name == "--data") options.data = value;
    if (name != "--log" && name != "--record") continue;
    if (!options.log.empty()) {
      detail::fail("launch", {"--log and --record are the same option, and both are given"},
                   "give one of them");
    }
    options.log = value;
  }
  return options;
}

}  // namespace lockstep

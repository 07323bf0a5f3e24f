// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `options.hpp`.

#include <algorithm>
#include <string_view>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/launch/session.hpp"
#include "lockstep/trainer/options.hpp"

namespace lockstep {

LOCKSTEP_INLINE TrainerOptions parse_trainer_options(const std::vector<std::string>& arguments) {
  const std::vector<std::string_view> words(arguments.begin(), arguments.end());
  detail::CutArguments cut = detail::cut_arguments(words, detail::trainer_flags);
  TrainerOptions options;
  options.arguments = std::move(cut.rest);
  const auto dashes = std::find(options.arguments.begin(), options.arguments.end(), "--");
  if (dashes != options.arguments.end()) options.arguments.erase(dashes);
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

namespace detail {

LOCKSTEP_INLINE TrainerOptions take_trainer_options(Session& session) {
  ProgramOptions& command_line = session.options();
  const bool is_first = command_line.takers() == 0;
  try {
    TrainerOptions options = parse_trainer_options(command_line.take(trainer_flags));
    if (!is_first && options.checkpoint.any()) {
      fail("launch",
           {"the program makes several jobs, and all of them would save into the folder that "
            "--checkpoint names"},
           "leave --checkpoint and its companions out, and give each job a folder of its own: "
           "job.checkpoints({.folder = \"...\"})");
    }
    if (!command_line.asks_for_help()) return options;
    TrainerOptions harmless;  // nothing is written or resumed
    harmless.data = options.data;
    return harmless;
  } catch (const Error& error) {
    throw command_line.speaks() ? error : error.as_consequence();
  }
}

LOCKSTEP_INLINE TrainerOptions leave_options_to_job(Session& session, TrainerOptions options,
                                                    const bool& /*is_noted*/) {
  session.options().leave_to_job();
  return options;
}

}  // namespace detail

}  // namespace lockstep

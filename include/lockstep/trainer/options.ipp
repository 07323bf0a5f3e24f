// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `options.hpp`.

#include <string_view>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/parse.hpp"
#include "lockstep/trainer/options.hpp"

namespace lockstep {

LOCKSTEP_INLINE TrainerOptions parse_trainer_options(const std::vector<std::string>& arguments) {
  TrainerOptions options;
  bool ours = true;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    if (argument == "--") ours = false;
    const std::size_t equals = argument.find('=');
    const std::string_view name = argument.substr(0, equals);
    if (i == 0 || !ours ||
        (name != "--log" && name != "--seed" && name != "--replicas" && name != "--data")) {
      options.arguments.emplace_back(argument);
      continue;
    }
    if (equals == std::string_view::npos && ++i == arguments.size()) {
      detail::fail("launch", {name, " has no value"}, "give it one, as in --seed 1");
    }
    const std::string_view value = equals == std::string_view::npos ? std::string_view(arguments[i])
                                                                    : argument.substr(equals + 1);
    if (name == "--log") {
      options.log = value;
    } else if (name == "--data") {
      options.data = value;
    } else if (name == "--replicas") {
      options.replicas = detail::parse_number(name, value);
    } else {
      options.seed = Seed{detail::parse_number(name, value)};
    }
  }
  return options;
}

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The time that ranks have to end when they are asked to.

#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <vector>

#include "lockstep/core/text.hpp"

namespace lockstep::detail {

/// Whether ranks save their state when they are asked to end.
enum class OnRequest { end, save };

/// What ranks do that have these arguments, the program's name first.
inline OnRequest on_request(const std::vector<std::string>& arguments) {
  for (std::size_t i = 1; i < arguments.size() && arguments[i] != "--"; ++i) {
    const std::string& word = arguments[i];
    if (word == "--checkpoint" || word.starts_with("--checkpoint=")) return OnRequest::save;
  }
  return OnRequest::end;
}

/// How long ranks have between SIGTERM and SIGKILL: 8 s, two less than the ten after which the job
/// must be over, or 60 s where they have to finish a step and to write a checkpoint.
/// LOCKSTEP_GRACE_SECONDS sets another time.
inline std::chrono::milliseconds termination_grace(OnRequest request) {
  const char* text = std::getenv("LOCKSTEP_GRACE_SECONDS");
  if (text == nullptr) return std::chrono::seconds(request == OnRequest::save ? 60 : 8);
  return parse_seconds("LOCKSTEP_GRACE_SECONDS", text);
}

}  // namespace lockstep::detail

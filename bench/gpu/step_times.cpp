// SPDX-License-Identifier: Apache-2.0
#include "step_times.hpp"

#include <nlohmann/json.hpp>

#include "torch_lines.hpp"

namespace bench {

std::map<std::string, StepTimes> torch_ways(const std::string& script, const std::string& word) {
  std::map<std::string, StepTimes> ways;
  each_torch_line("python3 " LOCKSTEP_SOURCE_DIR "/bench/" + script, 300, word,
                  [&](const nlohmann::json& read) {
                    const auto times = [&](const char* clock) {
                      return Times{true, read[clock]["median"], read[clock]["minimum"]};
                    };
                    ways[read["way"]] = {times("wall"), times("device")};
                  });
  return ways;
}

}  // namespace bench

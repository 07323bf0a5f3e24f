// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>
#include <string>

#include "step.hpp"
#include "torch_lines.hpp"

namespace bench {

std::map<std::string, StepTimes> torch_steps(const std::string& optimizer) {
  std::map<std::string, StepTimes> ways;
  each_torch_line("python3 " LOCKSTEP_SOURCE_DIR "/bench/gpu/step.py " + optimizer, 300, "step",
                  [&](const nlohmann::json& read) {
                    const auto times = [&](const char* clock) {
                      return Times{true, read[clock]["median"], read[clock]["minimum"]};
                    };
                    ways[read["way"]] = {times("wall"), times("device")};
                  });
  return ways;
}

}  // namespace bench

// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "step.hpp"

namespace bench {

std::map<std::string, StepTimes> torch_steps(const std::string& optimizer) {
  const char* const torch = std::getenv("LOCKSTEP_TORCH");
  if (torch == nullptr) return {};
  const std::string command = "timeout 300 " + std::string(torch) +
                              "/python3 " LOCKSTEP_SOURCE_DIR "/bench/gpu/step.py " + optimizer;
  FILE* const output = popen(command.c_str(), "r");
  if (output == nullptr) return {};
  std::map<std::string, StepTimes> ways;
  for (char line[512]; std::fgets(line, sizeof line, output) != nullptr;) {
    const std::string text(line);
    if (!text.starts_with("step ")) continue;
    const auto read = nlohmann::json::parse(text.substr(5));
    const auto times = [&](const char* clock) {
      return Times{true, read[clock]["median"], read[clock]["minimum"]};
    };
    ways[read["way"]] = {times("wall"), times("device")};
  }
  pclose(output);
  return ways;
}

}  // namespace bench

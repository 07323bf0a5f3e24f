// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "kernels.hpp"

namespace bench {

TorchTimes torch_adamw(int tensors) {
  const char* const torch = std::getenv("LOCKSTEP_TORCH");
  if (torch == nullptr) return {};
  const std::string command = "timeout 120 " + std::string(torch) +
                              "/python3 " LOCKSTEP_SOURCE_DIR "/bench/gpu/adamw.py " +
                              std::to_string(tensors) + " 2>/dev/null";
  FILE* const output = popen(command.c_str(), "r");
  if (output == nullptr) return {};
  TorchTimes times{};
  for (char line[512]; std::fgets(line, sizeof line, output) != nullptr;) {
    const std::string text(line);
    if (!text.starts_with("adamw ")) continue;
    const auto read = nlohmann::json::parse(text.substr(6));
    const auto of = [&](const char* way) {
      return Times{true, read[way]["median"], read[way]["minimum"]};
    };
    times = {of("eager"), of("graph")};
  }
  pclose(output);
  return times;
}

}  // namespace bench

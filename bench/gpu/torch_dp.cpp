// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "dp.hpp"

namespace bench {

Times torch_data_parallel() {
  const char* const torch = std::getenv("LOCKSTEP_TORCH");
  if (torch == nullptr) return {};
  const std::string command = "timeout 300 " + std::string(torch) +
                              "/python3 " LOCKSTEP_SOURCE_DIR "/bench/gpu/data_parallel.py";
  FILE* const output = popen(command.c_str(), "r");
  if (output == nullptr) return {};
  Times times{};
  for (char line[512]; std::fgets(line, sizeof line, output) != nullptr;) {
    const std::string text(line);
    if (!text.starts_with("step ")) {
      std::fputs(line, stdout);
      continue;
    }
    const auto read = nlohmann::json::parse(text.substr(5));
    times = {true, read["median"], read["minimum"]};
  }
  pclose(output);
  return times;
}

}  // namespace bench

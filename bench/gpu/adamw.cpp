// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>
#include <string>

#include "kernels.hpp"
#include "torch_lines.hpp"

namespace bench {

TorchTimes torch_adamw(int tensors) {
  TorchTimes times{};
  each_torch_line("python3 " LOCKSTEP_SOURCE_DIR "/bench/gpu/adamw.py " + std::to_string(tensors) +
                      " 2>/dev/null",
                  120, "adamw", [&](const nlohmann::json& read) {
                    const auto of = [&](const char* way) {
                      return Times{true, read[way]["median"], read[way]["minimum"]};
                    };
                    times = {of("eager"), of("graph")};
                  });
  return times;
}

}  // namespace bench

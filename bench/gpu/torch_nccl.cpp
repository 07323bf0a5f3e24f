// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>
#include <string>

#include "all_reduce.hpp"
#include "torch_lines.hpp"

namespace bench {

std::map<std::size_t, Times> nccl_over_sockets(std::size_t ranks) {
  std::map<std::size_t, Times> times;
  each_torch_line("torchrun --standalone --nproc-per-node " + std::to_string(ranks) +
                      " " LOCKSTEP_SOURCE_DIR "/bench/gpu/nccl.py 2>/dev/null",
                  120, "nccl", [&](const nlohmann::json& read) {
                    times[read["bytes"]] = Times{true, read["median"], read["minimum"]};
                  });
  return times;
}

}  // namespace bench

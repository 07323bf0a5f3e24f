// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "dp.hpp"
#include "torch_lines.hpp"

namespace bench {

Times torch_data_parallel() {
  Times times{};
  each_torch_line(
      "python3 " LOCKSTEP_SOURCE_DIR "/bench/gpu/data_parallel.py", 300, "step",
      [&](const nlohmann::json& read) { times = {true, read["median"], read["minimum"]}; });
  return times;
}

}  // namespace bench

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How much memory this process has.

#include <fstream>
#include <string>

namespace bench {

/// MiB of this process; pages that processes share are divided among them.
inline double own_mebibytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string word; rollup >> word;) {
    if (word != "Pss:") continue;
    double kibibytes = 0;
    rollup >> kibibytes;
    return kibibytes / 1024;
  }
  return 0;
}

}  // namespace bench

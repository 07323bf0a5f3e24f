// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How large the checkpoints are that are measured, how often, and where they go.

#include <unistd.h>

#include <cstddef>
#include <string>

namespace bench {

struct BenchOptions {
  std::size_t width = 0;  ///< of GPT-2
  int rounds = 7;
  std::string folder =
      LOCKSTEP_SOURCE_DIR "/build/bench";  ///< on a disk, as temporary folders may not be
};

/// The width is 768 (124 M parameters, 1.5 GB) on machines with 32 GiB or more, else 288 (0.3 GB).
inline BenchOptions parse_options(int argc, char** argv) {
  BenchOptions options;
  const double gibibytes = static_cast<double>(sysconf(_SC_PHYS_PAGES)) *
                           static_cast<double>(sysconf(_SC_PAGE_SIZE)) / (1 << 30);
  options.width = gibibytes >= 31 ? 768 : 288;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string word = argv[i];
    if (word == "--width") options.width = std::stoul(argv[i + 1]);
    if (word == "--rounds") options.rounds = std::stoi(argv[i + 1]);
    if (word == "--folder") options.folder = argv[i + 1];
  }
  return options;
}

}  // namespace bench

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The table of all comparisons, on the screen and as a file of build/bench.

#include <string>
#include <vector>

#include "kernels.hpp"

namespace bench {

/// Prints the rows and adds them to those of build/bench/`file`.json. A ratio is the peer's time
/// over lockstep's.
void print_table(const std::vector<Comparison>& rows, const std::string& file);

}  // namespace bench

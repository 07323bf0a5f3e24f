// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The table of all comparisons, on the screen and as build/bench/gpu.json.

#include <vector>

#include "kernels.hpp"

namespace bench {

/// Prints the rows and adds them to the file's. A ratio is the peer's time over lockstep's.
void print_table(const std::vector<Comparison>& rows);

}  // namespace bench

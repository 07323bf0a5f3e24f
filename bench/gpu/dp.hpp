// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The step of DP with 1, 2 and 4 replicas, on one GPU or more, against PyTorch's.

#include <vector>

#include "kernels.hpp"
#include "measure.hpp"

namespace bench {

/// PyTorch's DataParallel on the GPUs there are; unknown where it is not installed.
Times torch_data_parallel();

/// Also prints the memory that each takes of every GPU.
std::vector<Comparison> compare_data_parallel();

}  // namespace bench

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The fused kernels against copy bandwidth measured beside them, and against PyTorch's fused
/// AdamW.

#include <string>
#include <vector>

#include "measure.hpp"

namespace bench {

/// GPT-2's parameters.
inline constexpr std::size_t gpt2_parameters = 124'439'808;

/// One row of a table: device times in microseconds.
struct Comparison {
  std::string measure;
  Times own;
  Times peer;
  double target;  // of the ratio, 0: none
};

/// Each kernel's peer is a copy that moves as many bytes: the ratio is the share of the copy's
/// bandwidth. Then AdamW against PyTorch's, where that is installed (LOCKSTEP_TORCH).
std::vector<Comparison> compare_kernels();

/// AdamW cut into threads in other ways, as lines of a table.
void print_update_variants();

/// PyTorch's fused AdamW over as many parameters, as a user calls it and without its host's share.
struct TorchTimes {
  Times eager;
  Times graph;
};

/// In so many tensors; unknown where PyTorch is not installed.
TorchTimes torch_adamw(int tensors);

}  // namespace bench

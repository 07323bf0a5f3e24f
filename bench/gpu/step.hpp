// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The whole step of a small network against PyTorch's: launch by launch, and as one graph.

#include <vector>

#include "kernels.hpp"

namespace bench {

std::vector<Comparison> compare_steps();

}  // namespace bench

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file LibTorch's optimizers with lockstep: `ZeroRedundancyOptimizer`, and Python's state_dict of
/// each.

#include "lockstep/detail/torch/zero_redundancy_optimizer.hpp"
#include "lockstep/torch.hpp"

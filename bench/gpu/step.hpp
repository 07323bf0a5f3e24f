// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The whole step of a small network against PyTorch's: launch by launch, and as one graph.

#include <map>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "measure.hpp"

namespace bench {

/// Microseconds a step: by the host's clock, from the first of many to the last one's end, and
/// between events on the device.
struct StepTimes {
  Times wall;
  Times device;
};

/// PyTorch's DDP with `optimizer` ("sgd" or "adamw") by the way it is run: eager, graph, views,
/// compile, overhead. Empty where PyTorch is not installed.
std::map<std::string, StepTimes> torch_steps(const std::string& optimizer);

std::vector<Comparison> compare_steps();

}  // namespace bench

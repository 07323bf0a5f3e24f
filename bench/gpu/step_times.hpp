// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How long a step takes, by two clocks, and what bench/support/ddp_ways.py prints of that.

#include <map>
#include <string>

#include "measure.hpp"

namespace bench {

/// Microseconds a step: by the host's clock, from the first of many to the last one's end, and
/// between events on the device.
struct StepTimes {
  Times wall{};
  Times device{};
};

/// PyTorch's steps by the way that each is run, from the lines `word {json}` of a script of bench/
/// ("gpu/step.py sgd"). Empty where PyTorch is not installed.
std::map<std::string, StepTimes> torch_ways(const std::string& script, const std::string& word);

}  // namespace bench

// SPDX-License-Identifier: Apache-2.0
/// @file What tests on emulated GPUs include, compiled once before all batches, as in
/// tests/precompiled.hpp. What takes the place of CUDA's kernels comes first.

#include "gpu/emulated/kernels.hpp"
//
#include <boost/test/unit_test.hpp>
#include <nlohmann/json.hpp>

#include "gpu/emulated/machine.hpp"
#include "lockstep/lockstep.cuh"
#include "lockstep/lockstep.hpp"

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How kernels tell the host of an anomaly.

#include <cuda_runtime.h>

#include <cstdint>

#include "lockstep/optim/anomaly.hpp"

namespace lockstep::detail {

/// Notes the step, and raises the flag that the host reads. Threads that do it at once write the
/// same.
__device__ inline void tell_anomaly(const AnomalyWatch& watch, std::uint64_t step) {
  watch.record->step = step;
  *watch.seen = 1;
}

}  // namespace lockstep::detail

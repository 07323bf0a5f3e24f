// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How much memory of the device is in use, by whomever.

#include <cuda_runtime.h>

#include <cstddef>

#include "lockstep/detail/device/cuda/runtime.cuh"

namespace bench {

inline double used_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  lockstep::check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<double>(total - free);
}

inline double used_mebibytes() { return used_bytes() / (1 << 20); }

}  // namespace bench

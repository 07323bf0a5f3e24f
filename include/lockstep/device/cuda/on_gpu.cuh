// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Work on a GPU that need not be the calling thread's current one.

#include <cuda_runtime_api.h>

#include <cstddef>

#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/logical_gpus.cuh"

namespace lockstep::detail {

/// The calling thread uses another GPU for a while.
class OnGpu {
 public:
  explicit OnGpu(std::size_t gpu) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    check_cuda(cudaSetDevice(device_of(gpu)), "cudaSetDevice");
  }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  ~OnGpu() { static_cast<void>(cudaSetDevice(before_)); }

 private:
  int before_ = 0;
};

}  // namespace lockstep::detail

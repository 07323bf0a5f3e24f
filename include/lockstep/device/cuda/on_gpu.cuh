// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Work on a GPU that need not be the calling thread's current one.

#include <cuda_runtime_api.h>

#include <cstddef>

#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/logical_gpus.cuh"

namespace lockstep::detail {

/// Makes a GPU the calling thread's current one. Returns the device that was. Where they are the
/// same, this costs one look at a variable of CUDA's.
inline int select_gpu(std::size_t gpu) {
  const int device = device_of(gpu);
  int before = 0;
  check_cuda(cudaGetDevice(&before), "cudaGetDevice");
  if (before != device) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  return before;
}

/// The calling thread uses another GPU for a while.
class OnGpu {
 public:
  explicit OnGpu(std::size_t gpu)
      : before_(select_gpu(gpu)), has_changed_(before_ != device_of(gpu)) {}
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  ~OnGpu() {
    if (has_changed_) static_cast<void>(cudaSetDevice(before_));
  }

 private:
  int before_;
  bool has_changed_;
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Work on a GPU that need not be the calling thread's current one.

#include <cuda_runtime_api.h>

#include <cstddef>

#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/logical_gpus.cuh"

namespace lockstep::detail {

/// Makes a device the calling thread's current one. Returns the one that was. Where they are the
/// same, this costs one look at a variable of CUDA's.
inline int select_device(int device) {
  int before = 0;
  check_cuda(cudaGetDevice(&before), "cudaGetDevice");
  if (before != device) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  return before;
}
inline int select_gpu(std::size_t gpu) { return select_device(device_of(gpu)); }

/// The calling thread uses another device for a while.
class OnCudaDevice {
 public:
  explicit OnCudaDevice(int device)
      : before_(select_device(device)), has_changed_(before_ != device) {}
  OnCudaDevice(const OnCudaDevice&) = delete;
  OnCudaDevice& operator=(const OnCudaDevice&) = delete;
  ~OnCudaDevice() {
    if (has_changed_) static_cast<void>(cudaSetDevice(before_));
  }

 private:
  int before_;
  bool has_changed_;
};

/// The same with a GPU as the library counts them.
class OnGpu : public OnCudaDevice {
 public:
  explicit OnGpu(std::size_t gpu) : OnCudaDevice(device_of(gpu)) {}
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file GPUs as the library counts them, and the devices that CUDA knows.
///
/// They are the same, unless a test asks for more GPUs than there are, so that work which is
/// divided among several GPUs runs on a host with one.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdlib>
#include <string>

#include "lockstep/core/error.hpp"
#include "lockstep/device/cuda/check.cuh"

namespace lockstep::detail {

/// The devices that this process may use (CUDA_VISIBLE_DEVICES), 0 where there is no driver.
inline std::size_t cuda_devices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
      error == cudaErrorStubLibrary) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  check_cuda(error, "cudaGetDeviceCount");
  return static_cast<std::size_t>(count);
}

/// `LOCKSTEP_LOGICAL_GPUS=4`, which is for tests: the library counts four GPUs, whatever there is.
/// 0 where it is not set. The environment is read once.
inline std::size_t logical_gpus() {
  static const std::size_t count = [] {
    const char* const text = std::getenv("LOCKSTEP_LOGICAL_GPUS");
    if (text == nullptr || *text == '\0') return std::size_t{0};
    char* end = nullptr;
    const unsigned long long number = std::strtoull(text, &end, 10);
    if (*end == '\0' && *text >= '0' && *text <= '9' && number <= 64)
      return static_cast<std::size_t>(number);
    throw Error("Device<Cuda>", std::string("LOCKSTEP_LOGICAL_GPUS is ") + text,
                "give it a number up to 64, or leave it out: it is for tests");
  }();
  return count;
}

/// The GPUs that this process may use.
inline std::size_t visible_gpus() {
  const std::size_t devices = cuda_devices();
  return devices == 0 || logical_gpus() == 0 ? devices : logical_gpus();
}

/// The device of a GPU, for CUDA's functions. Logical GPUs have the devices by turns.
inline int device_of(std::size_t gpu) {
  return static_cast<int>(logical_gpus() == 0 ? gpu : gpu % cuda_devices());
}

}  // namespace lockstep::detail

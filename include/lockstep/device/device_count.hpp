// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How many GPUs a program can use.

#include <cstddef>

#include "lockstep/device/device.hpp"

#if defined(__CUDACC__)
#include "lockstep/device/cuda/gpu.cuh"
#endif

namespace lockstep {

namespace detail {

/// The devices beside the host that a file can use: GPUs where nvcc compiles it. A template,
/// because files of both kinds may be part of one program.
template <class Kind>
std::size_t count_devices() {
#if defined(__CUDACC__)
  return visible_gpus();
#else
  return 0;
#endif
}

#if defined(__CUDACC__)
using DeviceOfThisFile = Cuda;
#else
using DeviceOfThisFile = Cpu;
#endif

}  // namespace detail

/// How many GPUs this process may use (CUDA_VISIBLE_DEVICES counts); 0 without a driver, and in a
/// file that another compiler than nvcc compiles: such a file has no GPU jobs.
template <class Kind = detail::DeviceOfThisFile>
std::size_t device_count() {
  return detail::count_devices<Kind>();
}

}  // namespace lockstep

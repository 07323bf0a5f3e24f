// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Arrays of more elements than 32 bits count: written and judged on the GPU, every element.

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/macros.hpp"
#include "lockstep/detail/device/cuda/memory.cuh"
#include "lockstep/detail/device/cuda/runtime.cuh"

namespace large {

using lockstep::BFloat16;

/// More elements than an `int` counts; as bfloat16 more bytes than an `unsigned` does.
inline constexpr std::size_t count = (std::size_t{1} << 31) + 64;

/// A whole number for each element that bfloat16 holds exactly, and so do sums and halves of a few
/// of them. Neighbours differ, and so do elements 2^31 apart or 2^32 bytes.
struct Pattern {
  static constexpr std::size_t period = 61;
  int offset = 0;
  LOCKSTEP_HOST_DEVICE float operator()(std::size_t i) const {
    return static_cast<float>(static_cast<int>(i % period) - 30 + offset);
  }
};

template <class T, class Value>
__global__ void write_each(T* data, std::size_t n, Value value) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride)
    data[i] = static_cast<T>(value(i));
}

template <class T, class Value>
__global__ void judge_each(const T* data, std::size_t n, Value value, unsigned long long* wrong,
                           unsigned long long* first) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    if (static_cast<float>(data[i]) == value(i)) continue;
    atomicAdd(wrong, 1ULL);
    atomicMin(first, static_cast<unsigned long long>(i));
  }
}

/// Element i becomes `value(i)`. **Host** blocks.
template <class T, class Value>
void write(T* data, std::size_t n, const Value& value) {
  write_each<<<1056, 512>>>(data, n, value);
  lockstep::check_launch("write");
  lockstep::check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

/// Empty if every element i is `value(i)`. **Host** blocks until everything on the GPU is done.
template <class T, class Value>
std::string difference(const T* data, std::size_t n, const Value& value) {
  struct {
    unsigned long long wrong = 0;
    unsigned long long first = ~0ULL;
  } found;
  const lockstep::DeviceArena on_gpu(sizeof found);
  lockstep::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  lockstep::detail::copy_now(on_gpu.data(), &found, sizeof found);
  auto* const numbers = reinterpret_cast<unsigned long long*>(on_gpu.data());
  judge_each<<<1056, 512>>>(data, n, value, numbers, numbers + 1);
  lockstep::check_launch("judge");
  lockstep::detail::copy_now(&found, on_gpu.data(), sizeof found);
  if (found.wrong == 0) return {};
  return std::to_string(found.wrong) + " of " + std::to_string(n) +
         " elements are wrong, the first is element " + std::to_string(found.first);
}

}  // namespace large

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The checked mode of gradients on a GPU: fills and searches are enqueued among the model's
/// kernels, and the host waits for what they found at the end of a backward pass.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/device.hpp"
#include "lockstep/strategy/feature/checked_gradients.hpp"

namespace lockstep::detail {

template <class Bits>
LOCKSTEP_KERNEL fill_bits(Bits* data, Bits bits, std::size_t count) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride)
    data[i] = bits;
}

/// `*first` = the least of it and `base` + the place of an element that is not written.
template <class Bits>
LOCKSTEP_KERNEL find_unwritten(const Bits* data, UnwrittenBits<Bits> unwritten, std::size_t count,
                               unsigned long long base, unsigned long long* first) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    if (unwritten.are(data[i])) {
      atomicMin(first, base + i);
      return;
    }
  }
}

/// While a step is captured nothing is checked, because the host cannot wait then: the steps that
/// run call by call before are.
template <>
class WrittenCheck<Cuda> {
 public:
  explicit WrittenCheck(auto& comm) : stream_(comm.gpu().stream()), first_(sizeof none) { clear(); }

  template <class T>
  void spoil(std::span<T> gradient) {
    if (gradient.empty() || is_capturing()) return;
    using Bits = typename decltype(unwritten<T>())::Bits;
    launch_kernel<fill_bits<Bits>>("fill_bits", stream_, blocks, threads,
                                   reinterpret_cast<Bits*>(gradient.data()), unwritten<T>().pattern,
                                   gradient.size());
  }

  template <class T>
  void inspect(std::size_t parameter, std::span<const T> gradient) {
    if (gradient.empty() || is_capturing()) return;
    using Bits = typename decltype(unwritten<T>())::Bits;
    launch_kernel<find_unwritten<Bits>>(
        "find_unwritten", stream_, blocks, threads, reinterpret_cast<const Bits*>(gradient.data()),
        unwritten<T>(), gradient.size(), static_cast<unsigned long long>(parameter) << element_bits,
        first());
  }

  /// **Host** blocks until the stream is empty.
  std::optional<Unwritten> take() {
    if (is_capturing()) return std::nullopt;
    unsigned long long found = none;
    check_cuda(cudaMemcpyAsync(&found, first(), sizeof found, cudaMemcpyDeviceToHost, stream_),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    if (found == none) return std::nullopt;
    clear();
    return Unwritten{static_cast<std::size_t>(found >> element_bits),
                     static_cast<std::size_t>(found & ((1ULL << element_bits) - 1))};
  }

 private:
  static constexpr unsigned long long none = ~0ULL;
  static constexpr int element_bits = 40;  // the rest of the 64 bits are the parameter's number
  static constexpr unsigned blocks = 256;
  static constexpr unsigned threads = 256;

  unsigned long long* first() const { return reinterpret_cast<unsigned long long*>(first_.data()); }
  void clear() {
    check_cuda(cudaMemsetAsync(first(), 0xff, sizeof none, stream_), "cudaMemsetAsync");
  }
  bool is_capturing() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream_, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  cudaStream_t stream_;
  DeviceArena first_;
};

}  // namespace lockstep::detail

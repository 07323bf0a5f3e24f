// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The loops of collectives over elements in a GPU's memory, and scratch memory for them.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <span>

#include "lockstep/comm/combine.cuh"
#include "lockstep/comm/passes.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/device/cuda/memory.cuh"

namespace lockstep::detail {

template <class T, class Value, class Op>
LOCKSTEP_KERNEL prepare_elements(const T* from, std::size_t count, Value* to, std::size_t padded,
                                 Op op) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < padded;
       i += step) {
    to[i] = i < count ? op.prepare(from[i]) : Value{};
  }
}

template <class Value, class T, class Op>
LOCKSTEP_KERNEL finish_elements(const Value* from, T* to, std::size_t count, std::size_t ranks,
                                Op op) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    to[i] = op.template finish<T>(from[i], ranks);
  }
}

/// Passes on a stream, as kernels; passes over host memory are loops. **Host** does not block for
/// device memory. **Stream** in its order.
class StreamPasses {
 public:
  explicit StreamPasses(cudaStream_t stream) : stream_(stream) {}

  static bool is_device(const void* data) { return data != nullptr && !is_host_memory(data); }
  static bool takes(const void* data) { return is_device(data); }

  template <class T>
  void copy(std::span<const T> from, std::span<T> to) const {
    if (from.empty() || from.data() == to.data()) return;
    if (!is_device(to.data())) return HostPasses::copy(from, to);
    check_cuda(cudaMemcpyAsync(to.data(), from.data(), from.size_bytes(), cudaMemcpyDeviceToDevice,
                               stream_),
               "cudaMemcpyAsync");
  }

  template <class T, class Op>
  void combine(std::span<const T> gathered, std::span<T> out, const Op& op) const {
    if (out.empty()) return;
    if (!is_device(out.data())) return HostPasses::combine(gathered, out, op);
    combine_gathered(gathered, out, op, stream_);
  }

  template <class T, class Value, class Op>
  void prepare(std::span<const T> from, std::span<Value> to, const Op& op) const {
    if (to.empty()) return;
    launch_kernel<prepare_elements<T, Value, Op>>("prepare_elements", stream_, blocks(to.size()),
                                                  threads, from.data(), from.size(), to.data(),
                                                  to.size(), op);
  }

  template <class Value, class T, class Op>
  void finish(std::span<const Value> from, std::span<T> to, const Op& op, std::size_t ranks) const {
    if (from.empty()) return;
    launch_kernel<finish_elements<Value, T, Op>>("finish_elements", stream_, blocks(from.size()),
                                                 threads, from.data(), to.data(), from.size(),
                                                 ranks, op);
  }

 private:
  static constexpr unsigned threads = 256;

  /// A pass is bound by memory: more blocks than these gain nothing.
  static unsigned blocks(std::size_t count) {
    return static_cast<unsigned>(std::min<std::size_t>(1024, (count + threads - 1) / threads));
  }

  cudaStream_t stream_;
};

}  // namespace lockstep::detail

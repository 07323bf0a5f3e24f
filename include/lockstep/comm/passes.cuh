// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What stages do to elements by themselves, in a GPU's memory.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>

#include "lockstep/comm/passes.hpp"
#include "lockstep/comm/combine.cuh"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/memory.cuh"

namespace lockstep {

namespace detail {

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

struct ElementGrid {
  static constexpr unsigned threads = 256;
  unsigned blocks;

  /// A pass is bound by memory: more blocks than these gain nothing.
  explicit ElementGrid(std::size_t count)
      : blocks(
            static_cast<unsigned>(std::min<std::size_t>(1024, (count + threads - 1) / threads))) {}
};

}  // namespace detail

/// On the stream of the communicator's GPU. Of the host's memory, the host takes care.
template <class Comm>
  requires requires(Comm& comm) { comm.gpu().stream(); }
struct Passes<Comm> {
  static bool is_device(const void* data) { return data != nullptr && !is_host_memory(data); }
  static bool takes(const void* data) { return is_device(data); }

  template <class T, class Value, class Op>
  static void prepare(Comm& comm, std::span<T> from, std::span<Value> to, const Op& op) {
    if (to.empty()) return;
    const detail::ElementGrid grid(to.size());
    detail::prepare_elements<std::remove_const_t<T>, Value, Op>
        <<<grid.blocks, grid.threads, 0, comm.gpu().stream()>>>(from.data(), from.size(), to.data(),
                                                                to.size(), op);
    check_launch("prepare_elements");
  }

  template <class Value, class T, class Op>
  static void finish(Comm& comm, std::span<Value> from, std::span<T> to, const Op& op,
                     std::size_t ranks) {
    if (from.empty()) return;
    const detail::ElementGrid grid(from.size());
    detail::finish_elements<Value, T, Op><<<grid.blocks, grid.threads, 0, comm.gpu().stream()>>>(
        from.data(), to.data(), from.size(), ranks, op);
    check_launch("finish_elements");
  }

  template <class T, class Op>
  static void combine(Comm& comm, std::span<T> gathered, std::span<T> out, const Op& op) {
    if (out.empty()) return;
    if (!is_device(out.data())) return on_host::combine(gathered, out, op);
    reduce_gathered<T>(gathered.data(), gathered.size() / out.size(), out.data(), out.size(), op,
                       comm.gpu().stream());
  }

  template <class T>
  static void copy(Comm& comm, std::span<T> from, std::span<std::remove_const_t<T>> to) {
    if (from.empty()) return;
    if (!is_device(to.data())) {
      std::copy(from.begin(), from.end(), to.begin());
      return;
    }
    check_cuda(cudaMemcpyAsync(to.data(), from.data(), from.size_bytes(), cudaMemcpyDeviceToDevice,
                               comm.gpu().stream()),
               "cudaMemcpyAsync");
  }
};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Kernels as functions of the host, which runs their blocks and threads one after the other
/// when the stream gets there. Included before any header of the library, because kernels use
/// names that only nvcc knows.
///
/// The threads of a block run from the last to the first, each until it waits for the others or
/// ends. `cub::BlockReduce`, whose result is the first thread's alone, needs no wait
/// (include/cub/block/block_reduce.cuh).

#define __launch_bounds__(...)
#define __shared__ static thread_local

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>

#include "gpu/emulated/block.hpp"
#include "gpu/emulated/cuda.hpp"

// The kernel's thread that this one plays.
inline thread_local uint3 threadIdx{};
inline thread_local uint3 blockIdx{};
inline thread_local dim3 blockDim;
inline thread_local dim3 gridDim;

template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
void __stcs(T* to, T value) {
  *to = value;
}
template <class T>
void __stcg(T* to, T value) {
  *to = value;
}
/// Blocks of one kernel run one after the other, but two kernels may run at once.
template <class T>
T atomicMin(T* at, T value) {
  T old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (value < old &&
         !__atomic_compare_exchange_n(at, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
/// The last block of a kernel that counts its blocks finds the limit, and leaves zero.
inline unsigned atomicInc(unsigned* at, unsigned limit) {
  unsigned old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(at, &old, old >= limit ? 0 : old + 1, true, __ATOMIC_ACQ_REL,
                                      __ATOMIC_RELAXED)) {
  }
  return old;
}
inline void __threadfence() {}
inline void __syncthreads() {
  if (blockDim.x > 1) emulated::Block::get().wait();
}
/// All threads of a block call it.
template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned lanes) {
  static thread_local T values[1024];
  values[threadIdx.x] = value;
  __syncthreads();
  const unsigned other = threadIdx.x ^ lanes;
  const T result = other < blockDim.x ? values[other] : value;
  __syncthreads();
  return result;
}
using std::exp;
using std::log;
using std::sqrt;

#include "lockstep/detail/device/cuda/runtime.cuh"

namespace emulated {

/// Looks for addresses of emulated memory in an argument, and says which one the GPU may not touch.
/// Any word of an argument may be one: whatever a kernel is given, it may use.
inline std::string foreign_memory(int gpu, const void* argument, std::size_t bytes) {
  for (std::size_t at = 0; at + sizeof(void*) <= bytes; at += alignof(void*)) {
    const void* pointer = nullptr;
    std::memcpy(&pointer, static_cast<const char*>(argument) + at, sizeof pointer);
    if (pointer == nullptr) continue;
    const auto block = Memory::get().find(pointer);
    if (!block || block->is_host) continue;
    if (!may_touch(gpu, *block)) {
      return (block->pool != nullptr ? "pool memory of " : "memory of ") + gpu_text(block->gpu) +
             ", which " + gpu_text(gpu) + " cannot access";
    }
    if (block->gpu != gpu && host.corrupts_copies)
      return "memory of " + gpu_text(block->gpu) + ", on the way to which bits are lost";
  }
  return {};
}

struct Argument {
  const void* data;
  std::size_t bytes;
};

/// Can this launch be made? Says so as CUDA would: by the thread's last error.
inline bool may_launch(const char* name, cudaStream_t stream,
                       std::initializer_list<Argument> arguments) {
  const int gpu = current_gpu;
  const std::string kernel = std::string("kernel '") + name + "'";
  if (stream->gpu != gpu) {
    fault(cudaErrorInvalidResourceHandle, kernel + " is launched on a stream of " +
                                              gpu_text(stream->gpu) + ", but the thread's " +
                                              "current one is " + gpu_text(gpu));
    return false;
  }
  for (const Argument& argument : arguments) {
    const std::string foreign = foreign_memory(gpu, argument.data, argument.bytes);
    if (foreign.empty()) continue;
    fault(cudaErrorIllegalAddress, kernel + " is given " + foreign);
    return false;
  }
  return true;
}

/// Runs all threads of a kernel.
inline void run_kernel(dim3 blocks, unsigned threads, const std::function<void()>& thread) {
  gridDim = blocks;
  blockDim = dim3(threads);
  for (blockIdx.y = 0; blockIdx.y < blocks.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < blocks.x; ++blockIdx.x) {
      Block::get().run(threads, [](unsigned index) { threadIdx.x = index; }, thread);
    }
  }
}

inline void launch(const char* name, cudaStream_t stream, dim3 blocks, unsigned threads,
                   std::initializer_list<Argument> arguments, std::function<void()> thread) {
  stream = Gpu::get().stream_or_default(stream);
  count(Launch{name, stream->gpu, blocks, threads});
  if (blocks.x == 0 || blocks.y == 0 || blocks.y > 65535 || threads == 0 || threads > 1024) {
    fault(cudaErrorInvalidConfiguration,
          std::string("kernel '") + name + "' has no grid that a " + "GPU can run");
    return;
  }
  if (!may_launch(name, stream, arguments)) return;
  enqueue(stream,
          [blocks, threads, thread = std::move(thread)] { run_kernel(blocks, threads, thread); });
}
/// Arguments become the kernel's parameters when it is launched, not when it runs.
template <class... Parameters>
void launch(const char* name, cudaStream_t stream, dim3 blocks, unsigned threads,
            void (*kernel)(Parameters...),
            std::type_identity_t<std::decay_t<Parameters>>... arguments) {
  launch(name, stream, blocks, threads, {{&arguments, sizeof arguments}...},
         [=] { kernel(arguments...); });
}

}  // namespace emulated

template <auto Kernel, class... Arguments>
void lockstep::detail::launch_kernel(const char* name, cudaStream_t stream, dim3 blocks,
                                     unsigned threads, const Arguments&... arguments) {
  emulated::launch(name, stream, blocks, threads, Kernel, arguments...);
  check_launch(name);
}

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Device memory, pinned host memory, and blocking copies between host and device.

#include <cuda_runtime_api.h>

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "lockstep/detail/device/device.hpp"

namespace lockstep {

namespace detail {

/// Zeroed memory of the current GPU, or pinned host memory.
template <bool OnGpu>
class CudaArena {
 public:
  explicit CudaArena(std::size_t bytes) : bytes_(bytes) {
    static_assert(256 % arena_alignment == 0, "cudaMalloc aligns to 256 bytes");
    if (bytes == 0) return;
    void* data = nullptr;
    if constexpr (OnGpu) {
      check_cuda(cudaMalloc(&data, bytes), "cudaMalloc");
      data_.reset(static_cast<std::byte*>(data));
      check_cuda(cudaMemset(data, 0, bytes), "cudaMemset");
      // Other streams do not wait for the default stream.
      check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    } else {
      check_cuda(cudaMallocHost(&data, bytes), "cudaMallocHost");
      data_.reset(static_cast<std::byte*>(data));
      std::memset(data, 0, bytes);
    }
  }

  std::byte* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  using Delete = std::conditional_t<OnGpu, CudaDelete<cudaFree>, CudaDelete<cudaFreeHost>>;
  std::unique_ptr<std::byte, Delete> data_;
  std::size_t bytes_;
};

/// Pinned host memory: asynchronous copies need no host thread.
using PinnedArena = CudaArena<false>;

}  // namespace detail

/// Zeroed memory of a GPU, the counterpart of `HostArena`.
using DeviceArena = detail::CudaArena<true>;

namespace detail {

template <class T>
class DeviceElements {
 public:
  DeviceElements() = default;
  explicit DeviceElements(std::size_t count) : arena_(count * sizeof(T)), count_(count) {}
  T* data() const { return reinterpret_cast<T*>(arena_.data()); }
  std::size_t size() const { return count_; }
  operator std::span<T>() const { return {data(), count_}; }

 private:
  DeviceArena arena_{0};
  std::size_t count_ = 0;
};

/// Memory of another owner, pinned while this object lives.
using PinnedRange = std::unique_ptr<std::byte, CudaDelete<cudaHostUnregister>>;

/// Pins memory. Returns null if the system rejects: copies still work, but block the host.
inline PinnedRange pin(std::span<std::byte> memory) {
  if (cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterDefault) == cudaSuccess)
    return PinnedRange(memory.data());
  static_cast<void>(cudaGetLastError());  // or the next, unrelated call would report this error
  return nullptr;
}

/// **Host** blocks until every stream sees the copy; `cudaMemcpy` alone may return earlier.
inline void copy_now(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
  check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

/// **Host** blocks for pageable memory only. **Stream** ordered on `stream`.
inline void copy_async(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
}

/// **Stream** ordered on `stream`. **Host** does not block.
inline void zero_async(void* data, std::size_t bytes, cudaStream_t stream) {
  if (data == nullptr || bytes == 0) return;
  check_cuda(cudaMemsetAsync(data, 0, bytes, stream), "cudaMemsetAsync");
}

/// A copy of values in device memory. **Host** blocks.
template <class T>
DeviceElements<T> device_copy_of(const std::vector<T>& values) {
  DeviceElements<T> memory(values.size());
  copy_now(memory.data(), values.data(), values.size() * sizeof(T));
  return memory;
}

inline bool is_host_memory(const void* pointer) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  return attributes.type != cudaMemoryTypeDevice;
}

/// Copies between host and idle GPU memory, converting elements on the host. **Host** blocks.
class HostStaging {
 public:
  static constexpr std::size_t window = 4_MiB;

  void copy(std::byte* to, ElementKind to_kind, const std::byte* from, ElementKind from_kind,
            std::size_t count) {
    const std::size_t to_size = element_size(to_kind);
    const std::size_t from_size = element_size(from_kind);
    if (count == 0 || to_kind == from_kind) return copy_now(to, from, count * to_size);
    if (memory_.bytes() == 0) memory_ = HostArena(window);
    std::byte* const staged = memory_.data();  // in the GPU's element type
    const bool to_gpu = !is_host_memory(to);
    const std::size_t most = window / (to_gpu ? to_size : from_size);
    for (std::size_t some = 0; count != 0; count -= some) {
      some = std::min(most, count);
      if (to_gpu) {
        convert_elements(staged, to_kind, from, from_kind, some);
        copy_now(to, staged, some * to_size);
      } else {
        copy_now(staged, from, some * from_size);
        convert_elements(to, to_kind, staged, from_kind, some);
      }
      to += some * to_size;
      from += some * from_size;
    }
  }

 private:
  HostArena memory_{0};
};

}  // namespace detail

}  // namespace lockstep

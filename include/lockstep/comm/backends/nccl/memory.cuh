// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Memory that NCCL reaches without copying, and memory through which host data passes.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/comm/collective.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/memory.cuh"

namespace lockstep::detail::nccl {

/// Zeroed memory of the current GPU, from NCCL's allocator where that works on this system, else
/// plain device memory.
class Arena {
 public:
  explicit Arena(std::size_t bytes) : bytes_(bytes) {
    void* data = nullptr;
    if (bytes == 0) return;
    if (ncclMemAlloc(&data, bytes) == ncclSuccess) {
      data_.reset(static_cast<std::byte*>(data));
      check_cuda(cudaMemset(data, 0, bytes), "cudaMemset");
      // Other streams do not wait for the default one: the memory must be zero before they use it.
      check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    } else {
      static_cast<void>(cudaGetLastError());
      plain_.emplace(bytes);
    }
  }

  std::byte* data() const { return plain_ ? plain_->data() : data_.get(); }

  /// Registers the memory with a communicator. If that fails, NCCL copies instead.
  void add_to(ncclComm_t comm) {
    if (data_ == nullptr) return;
    if (ncclCommRegister(comm, data_.get(), bytes_, &registration_) != ncclSuccess) {
      registration_ = nullptr;
      static_cast<void>(cudaGetLastError());
    }
  }
  /// Called when the communicator no longer uses the memory, and before it ends.
  void remove_from(ncclComm_t comm) {
    if (registration_ != nullptr) static_cast<void>(ncclCommDeregister(comm, registration_));
    registration_ = nullptr;
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { static_cast<void>(ncclMemFree(data)); }
  };
  std::unique_ptr<std::byte, Free> data_;
  std::optional<DeviceArena> plain_;
  std::size_t bytes_;
  void* registration_ = nullptr;
};

/// Host data on its way to the GPU and back: pinned memory, and as much device memory. It is made
/// once, when the communicator is: to allocate or free in the middle of a call may wait for other
/// GPUs of the process, which wait for this rank. More data than fits travels in parts, and each
/// waits for the one before.
class Staging {
 public:
  static constexpr std::size_t bytes = 4_MiB;

  /// The length of a part's rows, where a rank gives and gets so many rows together.
  template <class T>
  static constexpr std::size_t width(std::size_t rows) {
    return (bytes - arena_alignment) / (rows * sizeof(T));
  }

  std::byte* host() const { return host_.data(); }
  std::byte* device() const { return device_.data(); }

 private:
  PinnedArena host_{bytes};
  DeviceArena device_{bytes};
};

/// Is it the host's memory? That of another GPU is an error: NCCL would read it through the wrong
/// one. Memory of a pool (`cudaMallocAsync`) is as good as any.
inline bool is_staged_memory(const void* data, const Gpu& gpu, const Call& call) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes");
  if (attributes.type != cudaMemoryTypeDevice) return true;
  if (attributes.device == gpu.device()) return false;
  throw Error(call.text(),
              "the memory is on GPU " + std::to_string(attributes.device) +
                  ", and this rank's is GPU " + std::to_string(gpu.device()),
              "allocate it while this rank's GPU is the current one, or copy it there", gpu.rank());
}

}  // namespace lockstep::detail::nccl

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Memory that NCCL reaches without copying, and memory through which host data passes.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "lockstep/core/bytes.hpp"
#include "lockstep/device/cuda/check.cuh"
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

/// Host data on its way to the GPU and back: pinned memory, and as much device memory. A user waits
/// for the copies before the memory is used again.
class Staging {
 public:
  void reserve(std::size_t bytes) {
    if (host_ && host_->bytes() >= bytes) return;
    const std::size_t size = std::max(bytes, host_ ? 2 * host_->bytes() : 64_KiB);
    host_.reset();
    device_.reset();
    host_.emplace(size);
    device_.emplace(size);
  }

  std::byte* host() const { return host_->data(); }
  std::byte* device() const { return device_->data(); }

 private:
  std::optional<PinnedArena> host_;
  std::optional<DeviceArena> device_;
};

}  // namespace lockstep::detail::nccl

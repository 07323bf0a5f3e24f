// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The GPU of a rank, its compute stream, and the calling thread's current device.

#include <cuda_runtime_api.h>

#include "lockstep/detail/device/cuda/runtime.cuh"
#include "lockstep/detail/device/gpu_sharing.hpp"

namespace lockstep::detail {

/// CUDA devices visible to this process; 0 without a driver.
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

/// `LOCKSTEP_LOGICAL_GPUS`, read once: the number of GPUs that tests pretend to have; 0 if unset.
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

/// GPUs that this process may use, logical ones included.
inline std::size_t visible_gpus() {
  const std::size_t devices = cuda_devices();
  return devices == 0 || logical_gpus() == 0 ? devices : logical_gpus();
}

/// The CUDA device of a GPU. Logical GPUs share devices round robin.
inline int device_of(std::size_t gpu) {
  return static_cast<int>(logical_gpus() == 0 ? gpu : gpu % cuda_devices());
}

/// Sets the current device and returns the previous one. Cheap if they are equal.
inline int select_gpu(std::size_t gpu) {
  int before = 0;
  check_cuda(cudaGetDevice(&before), "cudaGetDevice");
  if (before != device_of(gpu)) check_cuda(cudaSetDevice(device_of(gpu)), "cudaSetDevice");
  return before;
}

/// Sets the calling thread's current GPU for a scope. `gpu` may also be a device number.
class OnGpu {
 public:
  explicit OnGpu(std::size_t gpu)
      : before_(select_gpu(gpu)), has_changed_(before_ != device_of(gpu)) {}
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  ~OnGpu() {
    if (has_changed_) static_cast<void>(cudaSetDevice(before_));
  }

 private:
  int before_;
  bool has_changed_;
};

}  // namespace lockstep::detail

namespace lockstep {

/// A rank's GPU. The constructor makes it the current device of the calling thread.
class Gpu {
 public:
  Gpu(Rank rank, std::size_t index) : rank_(rank), index_(select(rank, index)) {}

  /// The GPU of the host's `local_rank`-th rank out of `local_world`.
  static Gpu of(Rank rank, std::size_t local_rank, std::size_t local_world, bool may_share) {
    return {rank,
            detail::gpu_index(rank, local_rank, local_world, detail::visible_gpus(), may_share)};
  }

  Rank rank() const { return rank_; }
  std::size_t index() const { return index_; }
  /// The CUDA device number: the index, unless tests use more GPUs than exist.
  int device() const { return detail::device_of(index_); }

  /// The compute stream: the model and the optimizer run on it.
  cudaStream_t stream() const { return stream_.get(); }

  /// Events of this GPU, whatever the current device is.
  std::vector<CudaEvent> events(std::size_t count) const {
    const detail::OnGpu current(index_);
    return std::vector<CudaEvent>(count);
  }

 private:
  static std::size_t select(Rank rank, std::size_t index) {
    rank_of_thread() = rank;
    check_cuda(cudaSetDevice(detail::device_of(index)), "cudaSetDevice");
    return index;
  }

  Rank rank_;
  std::size_t index_;
  CudaStream stream_;  // created on the GPU selected above
};

}  // namespace lockstep

namespace lockstep::detail {

/// Makes the communicator's GPU the thread's current device, and its rank that of errors. As a
/// class's first member, it does so while the others are constructed and destroyed.
template <class Comm>
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Comm& comm) { enter(comm); }
  /// Makes the communicator's GPU current without restoring the previous one.
  static void select(const Comm& comm) { select_gpu(comm.gpu().index()); }

  /// Restores the previous device once all members are constructed.
  void leave() { current_.reset(); }
  /// Called by the owner's destructor, before the other members are destroyed.
  void return_to(const Comm& comm) noexcept {
    try {
      enter(comm);
    } catch (const std::exception&) {  // CUDA may be shut down at process exit
    }
  }

 private:
  void enter(const Comm& comm) {
    current_.emplace(comm.gpu().index());
    rank_of_thread() = comm.rank();
  }

  std::optional<OnGpu> current_;
};

}  // namespace lockstep::detail

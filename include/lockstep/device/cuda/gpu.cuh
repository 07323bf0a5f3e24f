// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which GPU a rank uses, the stream on which it computes, and when the GPU is current.

#include <cuda_runtime_api.h>
#include <cstdlib>
#include <exception>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/runtime.cuh"
#include "lockstep/device/gpu_sharing.hpp"

namespace lockstep::detail {

/// The devices that this process may use (CUDA_VISIBLE_DEVICES), 0 where there is no driver.
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

/// `LOCKSTEP_LOGICAL_GPUS=4`, which is for tests: the library counts four GPUs, whatever there is.
/// 0 where it is not set. The environment is read once.
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

/// The GPUs that this process may use.
inline std::size_t visible_gpus() {
  const std::size_t devices = cuda_devices();
  return devices == 0 || logical_gpus() == 0 ? devices : logical_gpus();
}

/// The device of a GPU, for CUDA's functions. Logical GPUs have the devices by turns.
inline int device_of(std::size_t gpu) {
  return static_cast<int>(logical_gpus() == 0 ? gpu : gpu % cuda_devices());
}

/// Makes a GPU the calling thread's current one. Returns the device that was. Where they are the
/// same, this costs one look at a variable of CUDA's.
inline int select_gpu(std::size_t gpu) {
  int before = 0;
  check_cuda(cudaGetDevice(&before), "cudaGetDevice");
  if (before != device_of(gpu)) check_cuda(cudaSetDevice(device_of(gpu)), "cudaSetDevice");
  return before;
}

/// The calling thread uses another GPU for a while. A device's number is as good as the GPU's.
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

/// A rank's GPU, which becomes the current one of the thread that makes this object.
class Gpu {
 public:
  Gpu(Rank rank, std::size_t index) : rank_(rank), index_(select(rank, index)) {}

  /// The GPU of the host's `local_rank`-th rank of `local_world`.
  static Gpu of(Rank rank, std::size_t local_rank, std::size_t local_world, bool may_share) {
    return {rank,
            detail::gpu_index(rank, local_rank, local_world, detail::visible_gpus(), may_share)};
  }

  Rank rank() const { return rank_; }
  std::size_t index() const { return index_; }
  /// Its number among CUDA's devices, for calls of CUDA. It is the index, except in tests of more
  /// GPUs than there are.
  int device() const { return detail::device_of(index_); }

  /// The compute stream, on which the model and the optimizer run.
  cudaStream_t stream() const { return stream_.get(); }

  /// Events of this GPU, whichever is the current one.
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
  CudaStream stream_;  // of the GPU above, which is current now
};

}  // namespace lockstep

namespace lockstep::detail {

/// The edge between a program and its job on a GPU. The calling thread, whichever it is, works on
/// the GPU of a communicator while this object lives, and its errors name the communicator's rank.
///
/// As the first member of an object on a GPU, it lets the other members be constructed and
/// destroyed there, whatever the program's current GPU is.
template <class Comm>
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Comm& comm) { enter(comm); }
  /// Makes that GPU the calling thread's current one, for good.
  static void select(const Comm& comm) { select_gpu(comm.gpu().index()); }

  /// All members are there.
  void leave() { current_.reset(); }
  /// The members are about to be destroyed, before this one.
  void return_to(const Comm& comm) noexcept {
    try {
      enter(comm);
    } catch (const std::exception&) {  // at the end of a process CUDA may be gone
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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Streams and events that end with their owner.

#include <cuda_runtime_api.h>

#include <memory>
#include <type_traits>

#include "lockstep/device/cuda/check.cuh"

namespace lockstep {

/// A point in a stream, to wait for. It keeps no time, which makes it cheap.
class CudaEvent {
 public:
  CudaEvent() {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    event_.reset(event);
  }

  cudaEvent_t get() const { return event_.get(); }

  /// Records the point after all work that `stream` holds now.
  void record(cudaStream_t stream) const {
    check_cuda(cudaEventRecord(get(), stream), "cudaEventRecord");
  }
  /// Makes later work of `stream` wait for the recorded point. The host does not wait.
  void block(cudaStream_t stream) const {
    check_cuda(cudaStreamWaitEvent(stream, get(), 0), "cudaStreamWaitEvent");
  }
  /// **Host** blocks until the recorded point has been reached.
  void synchronize() const { check_cuda(cudaEventSynchronize(get()), "cudaEventSynchronize"); }
  /// Has the recorded point been reached? True for an event that was never recorded.
  bool test() const {
    const cudaError_t state = cudaEventQuery(get());
    if (state == cudaErrorNotReady) return false;
    check_cuda(state, "cudaEventQuery");
    return true;
  }

 private:
  std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, detail::CudaDelete<cudaEventDestroy>> event_;
};

/// A stream that does not wait for others, the default one included.
class CudaStream {
 public:
  CudaStream() : CudaStream(0) {}

  /// A stream whose kernels have priority, for communication, because other ranks wait for it.
  static CudaStream urgent() {
    int least = 0;
    int greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest),
               "cudaDeviceGetStreamPriorityRange");
    return CudaStream(greatest);
  }

  cudaStream_t get() const { return stream_.get(); }
  operator cudaStream_t() const { return get(); }  // NOLINT(google-explicit-constructor)

  /// **Host** blocks until the stream is empty.
  void synchronize() const { check_cuda(cudaStreamSynchronize(get()), "cudaStreamSynchronize"); }

 private:
  explicit CudaStream(int priority) {
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority),
               "cudaStreamCreateWithPriority");
    stream_.reset(stream);
  }

  std::unique_ptr<std::remove_pointer_t<cudaStream_t>, detail::CudaDelete<cudaStreamDestroy>>
      stream_;
};

}  // namespace lockstep

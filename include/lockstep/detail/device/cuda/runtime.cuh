// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Checked CUDA runtime calls, RAII streams and events, and the launch of kernels.

#include <cuda_runtime.h>

#include "lockstep/detail/core/error.hpp"

namespace lockstep {

/// The rank of the calling thread for error messages, set when the thread gets its GPU.
inline std::optional<Rank>& rank_of_thread() {
  thread_local std::optional<Rank> rank;
  return rank;
}

namespace detail {
inline std::string cuda_advice(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "take a smaller model or batch, or end what else uses the GPU (nvidia-smi shows it)";
    case cudaErrorNoDevice:
      return "run it where a GPU is, or use Device<Cpu>";
    case cudaErrorInsufficientDriver:
      return "install a driver that is as new as the CUDA toolkit";
    case cudaErrorNoKernelImageForDevice:
      return "compile for this GPU's architecture";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
      return "an earlier kernel is wrong, likely the model's: run it under compute-sanitizer";
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureImplicit:
      return "while a step is captured nothing may wait for the GPU, allocate its memory or use "
             "the default stream";
    default:
      return "see the CUDA runtime's documentation of this error";
  }
}
}  // namespace detail

/// Throws unless the call succeeded: `check_cuda(cudaSetDevice(0), "cudaSetDevice")`.
inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) [[likely]]
    return;
  static_cast<void>(cudaGetLastError());  // or the next, unrelated call would report this error
  throw Error(call, std::string(cudaGetErrorName(error)) + ", " + cudaGetErrorString(error),
              detail::cuda_advice(error), rank_of_thread());
}

namespace detail {
/// Deleter for `std::unique_ptr` that calls CUDA's or NCCL's function `End`.
template <auto End>
struct CudaDelete {
  template <class T>
  void operator()(T* made) const {
    static_cast<void>(End(made));
  }
};
}  // namespace detail

/// Throws if a kernel launch failed: `kernel<<<...>>>(...); check_launch("forward");`
inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaPeekAtLastError();
  if (error != cudaSuccess) [[unlikely]]
    check_cuda(error, kernel);
}

/// A CUDA event without timing, which makes it cheap.
class CudaEvent {
 public:
  CudaEvent() : CudaEvent(cudaEventDisableTiming) {}

  cudaEvent_t get() const { return event_.get(); }

  void record(cudaStream_t stream) const {
    check_cuda(cudaEventRecord(get(), stream), "cudaEventRecord");
  }
  /// Makes later work of `stream` wait for the event. **Host** does not block.
  void block(cudaStream_t stream) const {
    check_cuda(cudaStreamWaitEvent(stream, get(), 0), "cudaStreamWaitEvent");
  }
  /// **Host** blocks until the event has completed.
  void synchronize() const { check_cuda(cudaEventSynchronize(get()), "cudaEventSynchronize"); }
  /// Has the event completed? True for an event that was never recorded.
  bool test() const {
    const cudaError_t state = cudaEventQuery(get());
    if (state == cudaErrorNotReady) return false;
    check_cuda(state, "cudaEventQuery");
    return true;
  }

 protected:
  explicit CudaEvent(unsigned flags) {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, flags), "cudaEventCreate");
    event_.reset(event);
  }

 private:
  std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, detail::CudaDelete<cudaEventDestroy>> event_;
};

/// A non-blocking stream: it does not synchronize with the default stream.
class CudaStream {
 public:
  CudaStream() : CudaStream(0) {}

  /// A stream of the highest priority, for communication, because other ranks wait for it.
  static CudaStream urgent() {
    int least = 0;
    int greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest),
               "cudaDeviceGetStreamPriorityRange");
    return CudaStream(greatest);
  }

  cudaStream_t get() const { return stream_.get(); }
  operator cudaStream_t() const { return get(); }  // NOLINT(google-explicit-constructor)

  /// **Host** blocks until the stream is idle.
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

namespace lockstep::detail {

/// The blocks of a launch over `count` elements, `of_block` in each.
inline unsigned blocks_for(std::size_t count, std::size_t of_block) {
  return static_cast<unsigned>((count + of_block - 1) / of_block);
}

/// Launches `Kernel`; throws with `name` on failure. Without nvcc, tests that emulate GPUs define
/// this function themselves. **Host** does not block. **Stream** ordered on `stream`.
template <auto Kernel, class... Arguments>
void launch_kernel(const char* name, cudaStream_t stream, dim3 blocks, unsigned threads,
                   const Arguments&... arguments)
#if defined(__CUDACC__)
{
  Kernel<<<blocks, threads, 0, stream>>>(arguments...);
  check_launch(name);
}
#else
    ;
#endif

template <class T>
LOCKSTEP_KERNEL store(T* to, T value) {
  *to = value;
}

/// `*to = value` on the device. The value is a kernel argument: unlike a copy's source, it may
/// change as soon as this returns. **Host** does not block. **Stream** ordered on `stream`.
template <class T>
void launch_store(cudaStream_t stream, T* to, const std::type_identity_t<T>& value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 2048);
  launch_kernel<store<T>>("store", stream, 1, 1, to, value);
}

}  // namespace lockstep::detail

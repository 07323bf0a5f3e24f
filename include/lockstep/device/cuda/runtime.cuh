// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file CUDA's runtime as the library uses it: calls that are checked, and say what failed, on
/// which rank, and what to do about it; streams and events that end with their owner; how every
/// kernel is launched.

#include <cuda_runtime.h>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep {

/// The rank of the calling thread, for errors. It is set when the thread gets its GPU.
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
             "the "
             "default stream";
    default:
      return "see the CUDA runtime's documentation of this error";
  }
}
}  // namespace detail

/// Throws unless a CUDA call succeeded. `call` is its name: `check_cuda(cudaSetDevice(0),
/// "cudaSetDevice")`.
inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) [[likely]]
    return;
  static_cast<void>(cudaGetLastError());  // or the next, unrelated call would report it again
  throw Error(call, std::string(cudaGetErrorName(error)) + ", " + cudaGetErrorString(error),
              detail::cuda_advice(error), rank_of_thread());
}

namespace detail {
/// Ends what CUDA or NCCL has made, by its function for that: a deleter of `std::unique_ptr`.
template <auto End>
struct CudaDelete {
  template <class T>
  void operator()(T* made) const {
    static_cast<void>(End(made));
  }
};
}  // namespace detail

/// Throws unless the last kernel was launched: `kernel<<<...>>>(...); check_launch("forward");`
inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaPeekAtLastError();
  if (error != cudaSuccess) [[unlikely]]
    check_cuda(error, kernel);
}

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

namespace lockstep::detail {

/// Launches `Kernel` with `threads` threads in each of `blocks`, and throws by `name` if that
/// fails. The kernel is a template argument, so that the launch is the one that `<<<>>>` makes.
///
/// Another compiler than nvcc cannot launch kernels, but it can compile them as functions. Such a
/// program defines this function itself, as the tests do that play GPUs on the host.
///
/// **Stream** in its order. **Host** does not block.
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

/// `*to = value` on the device. The value travels as a kernel's argument: unlike a copy's source it
/// may change as soon as this returns. **Stream** in its order. **Host** does not block.
template <class T>
void launch_store(cudaStream_t stream, T* to, const std::type_identity_t<T>& value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 2048);
  launch_kernel<store<T>>("store", stream, 1, 1, to, value);
}

}  // namespace lockstep::detail

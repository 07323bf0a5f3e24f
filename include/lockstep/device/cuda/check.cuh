// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Every CUDA call is checked here: what failed, on which rank, and what to do about it.

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

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

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How every kernel of the library is launched.

#include <cuda_runtime.h>
#include <type_traits>

#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/check.cuh"

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

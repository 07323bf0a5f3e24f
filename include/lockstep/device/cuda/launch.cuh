// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How every kernel of the library is launched.

#include <cuda_runtime.h>

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

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Stores host values in device memory, in stream order.

#include <cuda_runtime.h>

#include <type_traits>

#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/launch.cuh"

namespace lockstep::detail {

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

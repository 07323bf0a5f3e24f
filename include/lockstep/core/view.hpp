// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What models see of their tensors: CCCL's mdspan, row-major, over host or device memory.

#include <cstddef>
#include <cuda/std/mdspan>
#include <type_traits>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/macros.hpp"

namespace lockstep {

static_assert(dynamic == cuda::std::dynamic_extent);

template <std::size_t... E>
using Extents = cuda::std::extents<std::size_t, E...>;

/// Where memory lies, as a type: `HostMemory` or `DeviceMemory`.
struct HostMemory {
  template <class T>
  using accessor = cuda::std::default_accessor<T>;
};

/// Reads and writes device memory from device code. Host code can pass such a view on, slice it and
/// ask for its pointer; an access there does not compile.
template <class T>
struct DeviceAccessor {
  using offset_policy = DeviceAccessor;
  using element_type = T;
  using reference = T&;
  using data_handle_type = T*;

  constexpr DeviceAccessor() = default;
  template <class U>
    requires std::is_convertible_v<U (*)[], T (*)[]>
  LOCKSTEP_HOST_DEVICE constexpr DeviceAccessor(DeviceAccessor<U>) {
  }  // view of T to view of const T

#if defined(__CUDACC__)
  __device__ constexpr reference access(data_handle_type data, std::size_t i) const {
    return data[i];
  }
#else
  constexpr reference access(data_handle_type data, std::size_t i) const {
    static_assert(sizeof(T) == 0,
                  "lockstep: this view is of device memory, which host code cannot read or write; "
                  "copy it to the host first, or do the work in a kernel");
    return data[i];
  }
#endif
  LOCKSTEP_HOST_DEVICE constexpr data_handle_type offset(data_handle_type data,
                                                         std::size_t i) const {
    return data + i;
  }
};

struct DeviceMemory {
  template <class T>
  using accessor = DeviceAccessor<T>;
};

/// A tensor somewhere: a pointer, and extents that cost nothing where they are static.
template <class Memory, class T, std::size_t... E>
using View = cuda::std::mdspan<T, Extents<E...>, cuda::std::layout_right,
                               typename Memory::template accessor<T>>;

template <class T, std::size_t... E>
using HostView = View<HostMemory, T, E...>;

template <class T, std::size_t... E>
using DeviceView = View<DeviceMemory, T, E...>;

static_assert(sizeof(HostView<float, 128, 784>) == sizeof(float*));

}  // namespace lockstep

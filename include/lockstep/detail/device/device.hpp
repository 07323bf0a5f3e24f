// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The device axis (`Cpu`, `Cuda`), the number of visible GPUs, and host memory.

#include <cstring>
#include <new>

#include "lockstep/detail/core/bytes.hpp"
#include "lockstep/detail/core/view.hpp"
#include "lockstep/detail/policy/policy.hpp"

#if defined(__CUDACC__)
#include "lockstep/detail/device/cuda/gpu.cuh"
#endif

namespace lockstep {

namespace axes {
struct Device : WithName<"Device"> {};
}  // namespace axes

/// Models run on the host.
struct Cpu : WithName<"Cpu">, Choice<axes::Device> {
  using memory = HostMemory;
};

/// Models enqueue kernels on a GPU; needs lockstep.cuh or nccl.cuh.
struct Cuda : WithName<"Cuda">, Choice<axes::Device> {
  using memory = DeviceMemory;
};

/// The policy that says where models run: `Device<Cuda>`.
template <class Kind>
struct Device : detail::ChoicePolicy<axes::Device, Kind> {};

namespace detail {
#if defined(__CUDACC__)
using DeviceOfThisFile = Cuda;
#else
using DeviceOfThisFile = Cpu;
#endif
}  // namespace detail

/// The number of visible GPUs; 0 without a driver or nvcc. A template, because files may differ.
template <class Kind = detail::DeviceOfThisFile>
std::size_t device_count() {
#if defined(__CUDACC__)
  return detail::visible_gpus();
#else
  return 0;
#endif
}

/// Zeroed host memory with the alignment of bucket plans. Communicators have their own arenas.
class HostArena {
 public:
  explicit HostArena(std::size_t bytes)
      : data_(static_cast<std::byte*>(::operator new(bytes, alignment))), bytes_(bytes) {
    if (bytes != 0) std::memset(data_.get(), 0, bytes);
  }

  std::byte* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  static constexpr std::align_val_t alignment{arena_alignment};
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, alignment); }
  };

  std::unique_ptr<std::byte, Free> data_;
  std::size_t bytes_;
};

}  // namespace lockstep

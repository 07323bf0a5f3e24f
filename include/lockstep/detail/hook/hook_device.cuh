// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The hooks' device passes on a GPU, enqueued on the compute stream and capturable.

#include "lockstep/detail/bucket/pack.cuh"
#include "lockstep/detail/device/cuda/memory.cuh"
#include "lockstep/detail/hook/pipeline.hpp"

namespace lockstep::detail {

/// Arrays must be aligned to 16 bytes.
template <>
class HookDevice<Cuda> {
 public:
  template <class T>
  using Elements = DeviceElements<T>;

  explicit HookDevice(cudaStream_t stream) : stream_(stream) {}
  explicit HookDevice(auto& comm) : HookDevice(comm.gpu().stream()) {}

  cudaStream_t stream() const { return stream_; }

  /// The current step's number in device memory, for kernels of a captured step, whose arguments
  /// are fixed at capture. **Stream** `set_step` is ordered on the compute stream.
  const std::uint64_t* step() { return step_.data(); }
  void set_step(std::uint64_t step) { launch_store(stream_, step_.data(), step); }

  template <class To, class From>
  void cast(std::span<To> to, std::span<From> from) const {
    cast_async(to, from, 1, stream_);
  }
  template <class T>
  void scale(std::span<T> values, double factor) const {
    cast_async(values, values, factor, stream_);
  }
  template <class T>
  void zero(std::span<T> values) const {
    zero_async(values.data(), values.size_bytes(), stream_);
  }

 private:
  cudaStream_t stream_;
  DeviceElements<std::uint64_t> step_{1};
};

}  // namespace lockstep::detail

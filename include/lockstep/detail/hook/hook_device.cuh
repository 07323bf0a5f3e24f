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
    launch_cast<dynamic, PackShape, SameElement<std::remove_const_t<From>>, SameElement<To>>(
        stream_, from.data(), to.data(), 1, to.size());
  }
  template <class T>
  void scale(std::span<T> values, double factor) const {
    launch_cast<dynamic, PackShape, SameElement<T>, SameElement<T>>(
        stream_, values.data(), values.data(), factor, values.size());
  }
  template <class T>
  void zero(std::span<T> values) const {
    if (values.empty()) return;
    check_cuda(cudaMemsetAsync(values.data(), 0, values.size_bytes(), stream_), "cudaMemsetAsync");
  }

 private:
  cudaStream_t stream_;
  DeviceElements<std::uint64_t> step_{1};
};

}  // namespace lockstep::detail

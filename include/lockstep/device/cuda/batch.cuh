// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How batches reach a GPU.

#include <cuda_runtime_api.h>
#include <tuple>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/runtime.cuh"

namespace lockstep {

/// Makes the batch that a model gets. By default it is the batch itself, which holds pointers into
/// device memory or is copied by the model. Specialised for batches that the library copies; a
/// program may specialise it for its own.
template <class Batch>
class BatchUpload {
 public:
  const Batch& operator()(const Batch& batch, cudaStream_t) { return batch; }
};

}  // namespace lockstep

namespace lockstep::detail {

/// Memory of the current GPU for what lies on another. It stays where it is until more is needed,
/// as captured steps want it.
class NearMemory {
 public:
  /// `from`, or a copy where that is another GPU's memory: from GPU to GPU, over the links between
  /// them where there are any. **Stream** in its order. **Host** does not block, unless the copy is
  /// larger than any before.
  template <class T>
  T* operator()(T* from, std::size_t count, cudaStream_t stream) {
    const std::size_t bytes = count * sizeof(T);
    if (bytes == 0 || from == nullptr) return from;
    cudaPointerAttributes owner{};
    check_cuda(cudaPointerGetAttributes(&owner, from), "cudaPointerGetAttributes");
    int here = 0;
    check_cuda(cudaGetDevice(&here), "cudaGetDevice");
    if (owner.type != cudaMemoryTypeDevice || owner.device == here) return from;
    if (!memory_ || memory_->bytes() < bytes) {
      check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // it may be in use
      memory_.emplace(align_up(bytes));
    }
    check_cuda(cudaMemcpyPeerAsync(memory_->data(), here, from, owner.device, bytes, stream),
               "cudaMemcpyPeerAsync");
    return reinterpret_cast<T*>(memory_->data());
  }

 private:
  std::optional<DeviceArena> memory_;
};

/// Gives what a model reads of a `Batch` on the current GPU: `near(batch, stream)` is the batch, or
/// one like it whose memory is this GPU's. Specialised for what is known to be device memory; other
/// batches are handed on as they are.
template <class Batch>
class NearBatch {
 public:
  static constexpr bool copies = false;
  const Batch& operator()(const Batch& batch, cudaStream_t) { return batch; }
};

template <class T, std::size_t... E>
class NearBatch<View<DeviceMemory, T, E...>> {
  using Tensor = View<DeviceMemory, T, E...>;

 public:
  static constexpr bool copies = true;
  const Tensor& operator()(const Tensor& view, cudaStream_t stream) {
    T* const data = memory_(view.data_handle(), view.size(), stream);
    near_.emplace(data, view.extents());
    return *near_;
  }

 private:
  NearMemory memory_;
  std::optional<Tensor> near_;
};

/// Tuples and pairs of batches.
template <template <class...> class Group, class... Parts>
  requires(NearBatch<Parts>::copies || ...) && requires { std::tuple_size<Group<Parts...>>::value; }
class NearBatch<Group<Parts...>> {
 public:
  static constexpr bool copies = true;
  const Group<Parts...>& operator()(const Group<Parts...>& batches, cudaStream_t stream) {
    near_.emplace([&]<std::size_t... I>(std::index_sequence<I...>) {
      return Group<Parts...>{std::get<I>(parts_)(std::get<I>(batches), stream)...};
    }(std::index_sequence_for<Parts...>{}));
    return *near_;
  }

 private:
  std::tuple<NearBatch<Parts>...> parts_;
  std::optional<Group<Parts...>> near_;
};

}  // namespace lockstep::detail

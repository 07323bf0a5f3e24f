// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Copies of batches to a GPU.

#include "lockstep/detail/device/cuda/memory.cuh"

namespace lockstep {

/// Makes the batch that a model gets: by default the batch itself, with device pointers or copied
/// by the model. The library specialises it for batches that it copies; a program may do so too.
template <class Batch>
class BatchUpload {
 public:
  const Batch& operator()(const Batch& batch, cudaStream_t) { return batch; }
};

}  // namespace lockstep

namespace lockstep::detail {

/// Memory for copies from another GPU. It moves only to grow, because captured steps refer to it.
class NearMemory {
 public:
  /// Returns `from`, or a peer-to-peer copy if `from` is another GPU's memory. **Host** blocks only
  /// if the copy is larger than all before. **Stream** ordered on `stream`.
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
      check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // may be in use
      memory_.emplace(align_up(bytes));
    }
    check_cuda(cudaMemcpyPeerAsync(memory_->data(), here, from, owner.device, bytes, stream),
               "cudaMemcpyPeerAsync");
    return reinterpret_cast<T*>(memory_->data());
  }

 private:
  std::optional<DeviceArena> memory_;
};

/// The batch, or one whose device memory is the current GPU's: for views, tuples and pairs.
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

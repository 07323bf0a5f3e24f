// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batches that lie in the memory of another GPU than the one that reads them.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>
#include <tuple>
#include <utility>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/memory.cuh"

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
template <class Batches, class... Parts>
class NearParts {
 public:
  static constexpr bool copies = true;
  const Batches& operator()(const Batches& batches, cudaStream_t stream) {
    near_.emplace([&]<std::size_t... I>(std::index_sequence<I...>) {
      return Batches{std::get<I>(parts_)(std::get<I>(batches), stream)...};
    }(std::index_sequence_for<Parts...>{}));
    return *near_;
  }

 private:
  std::tuple<NearBatch<Parts>...> parts_;
  std::optional<Batches> near_;
};

template <class... Ts>
  requires(NearBatch<Ts>::copies || ...)
class NearBatch<std::tuple<Ts...>> : public NearParts<std::tuple<Ts...>, Ts...> {};
template <class A, class B>
  requires(NearBatch<A>::copies || NearBatch<B>::copies)
class NearBatch<std::pair<A, B>> : public NearParts<std::pair<A, B>, A, B> {};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The kernels of `TopK`: the largest elements of a bucket, by CUB's radix sort.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cub/device/device_radix_sort.cuh>
#include <cuda/std/bit>
#include <type_traits>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/check.cuh"

namespace lockstep::detail {

/// The bits of a magnitude, which have its order; NaN is the largest.
template <class A>
using MagnitudeBits = std::conditional_t<sizeof(A) == 4, std::uint32_t, std::uint64_t>;

/// A sort of `count` magnitudes, in memory that belongs to nobody between two sorts.
template <class A>
class MagnitudeSort {
  using Bits = MagnitudeBits<A>;

 public:
  explicit MagnitudeSort(std::size_t count) : count_(count) {
    if (count == 0) return;
    cub::DoubleBuffer<Bits> keys;
    cub::DoubleBuffer<std::uint32_t> places;
    check_cuda(run(nullptr, storage_bytes_, keys, places, nullptr), "cub::DeviceRadixSort");
  }

  std::size_t bytes() const { return 2 * (key_bytes() + place_bytes()) + storage_bytes_; }

  Bits* keys(std::byte* memory) const { return reinterpret_cast<Bits*>(memory); }
  std::uint32_t* places(std::byte* memory) const {
    return reinterpret_cast<std::uint32_t*>(memory + 2 * key_bytes());
  }

  /// Sorts the keys and the places that go with them, the largest first and equal ones as they
  /// were. Returns where the places are then. **Stream** in its order. **Host** does not block.
  const std::uint32_t* sort(cudaStream_t stream, std::byte* memory) const {
    cub::DoubleBuffer<Bits> sorted(keys(memory), keys(memory + key_bytes()));
    cub::DoubleBuffer<std::uint32_t> order(places(memory), places(memory + place_bytes()));
    std::size_t bytes = storage_bytes_;
    check_cuda(run(memory + 2 * (key_bytes() + place_bytes()), bytes, sorted, order, stream),
               "cub::DeviceRadixSort");
    return order.Current();
  }

 private:
  std::size_t key_bytes() const { return align_up(count_ * sizeof(Bits)); }
  std::size_t place_bytes() const { return align_up(count_ * sizeof(std::uint32_t)); }
  cudaError_t run(void* storage, std::size_t& bytes, cub::DoubleBuffer<Bits>& keys,
                  cub::DoubleBuffer<std::uint32_t>& places, cudaStream_t stream) const {
    // The sign's bit is zero.
    return cub::DeviceRadixSort::SortPairsDescending(
        storage, bytes, keys, places, count_, 0, static_cast<int>(8 * sizeof(Bits)) - 1, stream);
  }

  std::size_t count_;
  std::size_t storage_bytes_ = 0;
};

inline constexpr unsigned selection_threads = 256;

/// The residual takes the gradients in; its magnitudes are the keys of a sort.
template <class T>
LOCKSTEP_KERNEL __launch_bounds__(selection_threads)
    take_gradients(const T* gradients, Accumulator<T>* residual,
                   MagnitudeBits<Accumulator<T>>* keys, std::uint32_t* places, std::size_t count) {
  using Bits = MagnitudeBits<Accumulator<T>>;
  const std::size_t i = std::size_t{blockIdx.x} * selection_threads + threadIdx.x;
  if (i >= count) return;
  const Accumulator<T> value = residual[i] + static_cast<Accumulator<T>>(gradients[i]);
  residual[i] = value;
  keys[i] = cuda::std::bit_cast<Bits>(value) & (~Bits{0} >> 1);
  places[i] = static_cast<std::uint32_t>(i);
}

/// Words behind places hold values. A double there need not lie at a multiple of eight bytes.
struct TwoWords {
  std::uint32_t at[2];
};
template <class T>
__device__ T value_at(const std::uint32_t* words, std::size_t i) {
  if constexpr (sizeof(T) == sizeof(TwoWords)) {
    return cuda::std::bit_cast<T>(TwoWords{{words[2 * i], words[2 * i + 1]}});
  } else {
    return reinterpret_cast<const T*>(words)[i];
  }
}
template <class T>
__device__ void put_value(std::uint32_t* words, std::size_t i, T value) {
  if constexpr (sizeof(T) == sizeof(TwoWords)) {
    const auto two = cuda::std::bit_cast<TwoWords>(value);
    words[2 * i] = two.at[0];
    words[2 * i + 1] = two.at[1];
  } else {
    reinterpret_cast<T*>(words)[i] = value;
  }
}

/// The first `count` elements of an order leave the residual, but for what rounding to T has left.
template <class T>
LOCKSTEP_KERNEL __launch_bounds__(selection_threads)
    send_largest(const std::uint32_t* order, Accumulator<T>* residual, std::uint32_t* sent,
                 std::size_t count) {
  using A = Accumulator<T>;
  const std::size_t i = std::size_t{blockIdx.x} * selection_threads + threadIdx.x;
  if (i >= count) return;
  const std::uint32_t place = order[i];
  const A own = residual[place];
  const T value = static_cast<T>(own);
  const A rest = own - static_cast<A>(value);
  sent[i] = place;
  put_value(sent + count, i, value);
  residual[place] = rest - rest == 0 ? rest : A{0};
}

/// Adds what one rank has sent, which has every place once. Ranks come one after the other, so that
/// sums are the same bits on all of them.
template <class T>
LOCKSTEP_KERNEL __launch_bounds__(selection_threads)
    add_largest(const std::uint32_t* sent, T* sums, Accumulator<T> ranks, std::size_t count) {
  using A = Accumulator<T>;
  const std::size_t i = std::size_t{blockIdx.x} * selection_threads + threadIdx.x;
  if (i >= count) return;
  T& sum = sums[sent[i]];
  const auto value = static_cast<A>(value_at<T>(sent + count, i));
  sum = static_cast<T>(static_cast<A>(sum) + value / ranks);
}

}  // namespace lockstep::detail

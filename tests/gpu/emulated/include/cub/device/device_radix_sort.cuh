// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What the library uses of CUB's radix sort, for GPUs that the host plays: the sort is a
/// function of the host, which runs when the stream gets there. Included behind kernels.hpp.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace cub {

template <class T>
struct DoubleBuffer {
  T* buffers[2] = {nullptr, nullptr};
  int selector = 0;

  DoubleBuffer() = default;
  DoubleBuffer(T* current, T* other) : buffers{current, other} {}
  T* Current() const { return buffers[selector]; }
  T* Alternate() const { return buffers[1 - selector]; }
};

struct DeviceRadixSort {
  template <class Key, class Value>
  static cudaError_t SortPairsDescending(void* storage, std::size_t& bytes, DoubleBuffer<Key>& keys,
                                         DoubleBuffer<Value>& values, std::size_t count, int, int,
                                         cudaStream_t stream) {
    if (storage == nullptr) {
      bytes = 256;
      return cudaSuccess;
    }
    emulated::enqueue(stream, [=, from = keys, with = values] {
      std::vector<std::size_t> order(count);
      std::iota(order.begin(), order.end(), std::size_t{0});
      // A stable sort by another name: std::stable_sort takes memory in a way that tests do not
      // count.
      std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        const auto first = from.Current()[a];
        const auto second = from.Current()[b];
        return first > second || (first == second && a < b);
      });
      for (std::size_t i = 0; i < count; ++i) {
        from.Alternate()[i] = from.Current()[order[i]];
        with.Alternate()[i] = with.Current()[order[i]];
      }
    });
    keys.selector ^= 1;
    values.selector ^= 1;
    return cudaSuccess;
  }
};

}  // namespace cub

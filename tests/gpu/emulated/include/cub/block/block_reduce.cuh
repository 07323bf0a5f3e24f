// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What the library uses of CUB, for kernels that the host plays: threads of a block run from
/// the last to the first, so that the first one finds everybody's value.

#include <cuda_runtime.h>

namespace cub {

template <class T, int Threads>
class BlockReduce {
 public:
  using TempStorage = T;

  explicit BlockReduce(TempStorage& storage) : storage_(storage) {}

  /// The sum is the first thread's alone, as CUB says.
  T Sum(T value) {
    storage_ = threadIdx.x + 1 == blockDim.x ? value : storage_ + value;
    return storage_;
  }

 private:
  TempStorage& storage_;
};

}  // namespace cub

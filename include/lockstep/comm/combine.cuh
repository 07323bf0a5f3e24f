// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Reduces what was gathered from all ranks, in rank order: for operations that a backend
/// does not have itself.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/device/cuda/check.cuh"

namespace lockstep {

namespace detail {

template <class T, class Op>
LOCKSTEP_KERNEL combine_gathered(const T* gathered, std::size_t ranks, T* out, std::size_t count,
                                 Op op) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    auto sum = op.prepare(gathered[i]);
    for (std::size_t w = 1; w < ranks; ++w)
      sum = op.combine(sum, op.prepare(gathered[w * count + i]));
    out[i] = op.template finish<T>(sum, ranks);
  }
}

}  // namespace detail

/// out = op over ranks of `gathered`, which holds `count` elements of every rank, one rank's behind
/// the other's. Every rank that does this has the same bits. **Stream** `stream`.
template <class T, class Op>
void reduce_gathered(const T* gathered, std::size_t ranks, T* out, std::size_t count, const Op& op,
                     cudaStream_t stream) {
  static_assert(ReduceOp<Op, T>,
                "lockstep: this reduce operation is not defined for these elements");
  if (count == 0) return;
  constexpr std::size_t threads = 256;
  constexpr std::size_t most_blocks = 1024;  // it is bound by memory: more gain nothing
  const std::size_t blocks = std::min(most_blocks, (count + threads - 1) / threads);
  detail::combine_gathered<T, Op>
      <<<static_cast<unsigned>(blocks), threads, 0, stream>>>(gathered, ranks, out, count, op);
  check_launch("combine_gathered");
}

}  // namespace lockstep

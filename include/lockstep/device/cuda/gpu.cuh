// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which GPU a rank uses, and the stream on which it computes.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/logical_gpus.cuh"
#include "lockstep/device/cuda/stream.cuh"
#include "lockstep/device/gpu_sharing.hpp"

namespace lockstep {

/// A rank's GPU, which becomes the current one of the thread that makes this object.
class Gpu {
 public:
  Gpu(Rank rank, std::size_t index) : rank_(rank), index_(select(rank, index)) {}

  /// The GPU of the host's `local_rank`-th rank of `local_world`.
  static Gpu of(Rank rank, std::size_t local_rank, std::size_t local_world, bool may_share) {
    return {rank,
            detail::gpu_index(rank, local_rank, local_world, detail::visible_gpus(), may_share)};
  }

  Rank rank() const { return rank_; }
  std::size_t index() const { return index_; }
  /// Its number among CUDA's devices, for calls of CUDA. It is the index, except in tests of more
  /// GPUs than there are.
  int device() const { return detail::device_of(index_); }

  /// The compute stream, on which the model and the optimizer run.
  cudaStream_t stream() const { return stream_.get(); }

 private:
  static std::size_t select(Rank rank, std::size_t index) {
    rank_of_thread() = rank;
    check_cuda(cudaSetDevice(detail::device_of(index)), "cudaSetDevice");
    return index;
  }

  Rank rank_;
  std::size_t index_;
  CudaStream stream_;  // of the GPU above, which is current now
};

}  // namespace lockstep

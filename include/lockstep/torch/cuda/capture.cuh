// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A module's step inside a CUDA graph: memory that lives as long as the graph, and random
/// numbers that differ from run to run.

#include <ATen/autocast_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <optional>

#include "lockstep/torch/cuda/random_state.cuh"
#include "lockstep/torch/cuda/step_tensors.cuh"
#include "lockstep/torch/model.hpp"

namespace lockstep::detail {

/// Memory of LibTorch's allocator that nobody else gets while this lives: a graph writes to it in
/// every run, and LibTorch, which took it back when the step's tensors ended, must not lend it.
class CapturePool {
 public:
  CapturePool() : device_(current_torch_gpu().index()), id_(at::cuda::graph_pool_handle()) {}
  CapturePool(const CapturePool&) = delete;
  CapturePool& operator=(const CapturePool&) = delete;
  ~CapturePool() {
    if (!is_used_) return;
    try {
      if (is_open_) c10::cuda::CUDACachingAllocator::endAllocateToPool(device_, id_);
      c10::cuda::CUDACachingAllocator::releasePool(device_, id_);
    } catch (...) {  // the allocator ends before us where the program does
    }
  }

  /// From here on, what is allocated for `stream`, or for a stream that joins its capture, comes
  /// from the pool.
  void open(cudaStream_t stream) {
    c10::cuda::CUDACachingAllocator::beginAllocateToPool(
        device_, id_, [stream](cudaStream_t other) {
          if (other == stream) return true;
          cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
          return cudaStreamIsCapturing(other, &status) == cudaSuccess &&
                 status == cudaStreamCaptureStatusActive;
        });
    is_used_ = is_open_ = true;
  }
  void close() {
    c10::cuda::CUDACachingAllocator::endAllocateToPool(device_, id_);
    is_open_ = false;
  }

 private:
  c10::DeviceIndex device_;
  decltype(at::cuda::graph_pool_handle()) id_;
  bool is_used_ = false;
  bool is_open_ = false;
};

/// What a graph with a module's step needs from LibTorch (`GuardingCaptures`).
template <>
class TorchCapture<cudaStream_t> {
 public:
  /// Ranks that are captured together share one generator, and no order among them is set: where
  /// they draw random numbers, LibTorch refuses, and steps run call by call.
  TorchCapture(cudaStream_t stream, bool jointly)
      : stream_(stream), pool_(std::make_unique<CapturePool>()) {
    if (!jointly) random_.emplace();
  }

  void begin() {
    const OnTorchStream on(stream_);
    // Weights that were cast outside the graph would not be cast again inside.
    at::autocast::clear_cache();
    if (random_) random_->begin();
    pool_->open(stream_);
  }
  void end() {
    pool_->close();
    if (random_) random_->end();
    at::autocast::clear_cache();
  }
  void before_replay() {
    if (random_) random_->before_replay(stream_);
  }

 private:
  cudaStream_t stream_;
  std::unique_ptr<CapturePool> pool_;
  std::optional<CapturedRandomState<>> random_;
};

}  // namespace lockstep::detail

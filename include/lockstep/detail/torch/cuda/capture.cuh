// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A module's step in a CUDA graph: its memory and its random numbers.

#include <ATen/autocast_mode.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include "lockstep/detail/torch/cuda/step_tensors.cuh"
#include "lockstep/detail/torch/model.hpp"

namespace lockstep::detail {

/// Sets the generator state of a graph's kernels. A template, since a kernel cannot be inline.
template <class T>
LOCKSTEP_KERNEL write_random_state(T* seed, T seed_value, T* offset, T offset_value) {
  *seed = seed_value;
  *offset = offset_value;
}

/// True since LibTorch 2.4. With another layout graphs get no random numbers, and captures say so.
template <class State>
concept CapturableRandomState = requires(State& state) {
  state.seed_;
  state.philox_offset_per_thread_;
  state.offset_intragraph_;
  state.capturing_;
  state.seed_extragraph_;
  state.offset_extragraph_;
};

/// The state of the GPU's default generator during a capture. Captured kernels read seed and offset
/// from device memory, which every replay rewrites, as LibTorch's own graphs do.
template <class State = at::CUDAGeneratorState>
class CapturedRandomState {
 public:
  static constexpr bool is_supported = CapturableRandomState<State>;

  /// Before the capture: gives the generator an equal state that is known here.
  void begin() {
    if constexpr (is_supported) {
      const at::Generator& generator = at::cuda::detail::getDefaultCUDAGenerator();
      auto* const own = generator.get<at::CUDAGeneratorImpl>();
      const std::lock_guard lock(own->mutex_);
      state_ = c10::make_intrusive<State>(own->current_seed(), own->philox_offset_per_thread());
      const auto options = at::TensorOptions().dtype(at::kLong).device(own->device());
      state_->seed_extragraph_ = at::empty({1}, options);
      state_->offset_extragraph_ = at::empty({1}, options);
      own->graphsafe_set_state(
          c10::make_intrusive<at::CUDAGeneratorImpl>(own->device().index(), state_));
      state_->capturing_ = true;
    }
  }

  /// After the capture: learns how far one replay advances the sequence.
  void end() {
    if constexpr (is_supported) {
      state_->capturing_ = false;
      steps_ = std::exchange(state_->offset_intragraph_, 0);
    }
  }

  /// **Stream** before the graph.
  void before_replay(cudaStream_t stream) {
    if constexpr (is_supported) {
      if (steps_ == 0) return;
      const at::Generator& generator = at::cuda::detail::getDefaultCUDAGenerator();
      auto* const own = generator.get<at::CUDAGeneratorImpl>();
      const std::lock_guard lock(own->mutex_);
      const std::uint64_t offset = own->philox_offset_per_thread();
      using Number = std::int64_t;
      launch_kernel<write_random_state<Number>>(
          "write_random_state", stream, 1, 1,
          static_cast<Number*>(state_->seed_extragraph_.data_ptr()),
          static_cast<Number>(own->current_seed()),
          static_cast<Number*>(state_->offset_extragraph_.data_ptr()), static_cast<Number>(offset));
      own->set_philox_offset_per_thread(offset + steps_);
    }
  }

 private:
  c10::intrusive_ptr<State> state_;
  std::uint64_t steps_ = 0;
};

/// A private pool of LibTorch's allocator for a graph, which writes to it in every replay:
/// LibTorch, which freed it when the step's tensors ended, must not reuse it.
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

  /// Allocations for `stream`, or a stream that joins its capture, now come from the pool.
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

/// LibTorch's part of a graph with a module's step (see `make_capture_guard`).
template <>
class TorchCapture<cudaStream_t> {
 public:
  /// Ranks that are captured together share a generator: if they draw from it, LibTorch throws.
  TorchCapture(cudaStream_t stream, bool jointly)
      : stream_(stream), pool_(std::make_unique<CapturePool>()) {
    if (!jointly) random_.emplace();
  }

  void begin() {
    const auto on = on_torch_stream(stream_);
    // Weights cast outside of the graph would not be cast again inside.
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

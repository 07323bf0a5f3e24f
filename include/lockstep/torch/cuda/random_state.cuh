// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Random numbers of LibTorch inside a graph: every run of the graph draws others.

#include <ATen/core/Generator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/util/intrusive_ptr.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <type_traits>
#include <utility>

#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/launch.cuh"

namespace lockstep::detail {

/// Writes what kernels of a graph read of a generator. A template, because a kernel in a header
/// cannot be inline.
template <class T>
LOCKSTEP_KERNEL write_random_state(T* seed, T seed_value, T* offset, T offset_value) {
  *seed = seed_value;
  *offset = offset_value;
}

/// LibTorch has what is needed here since 2.4; a later version that keeps a generator's state in
/// another way gets no random numbers in graphs, and the capture says so.
template <class State>
concept CapturableRandomState = requires(State& state) {
  state.seed_;
  state.philox_offset_per_thread_;
  state.offset_intragraph_;
  state.capturing_;
  state.seed_extragraph_;
  state.offset_extragraph_;
};

/// The state of the GPU's default generator during a capture. Kernels that are captured read the
/// seed and the place in the sequence from device memory, to which every replay writes anew.
/// LibTorch's own graphs do the same, for graphs that they capture themselves.
template <class State = at::CUDAGeneratorState>
class CapturedRandomState {
 public:
  static constexpr bool is_supported = CapturableRandomState<State>;

  /// Before the capture begins. The generator goes on as it was, with a state that is known here.
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

  /// After it. The steps of the sequence that one run takes are known now.
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

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Who still has batches, on a GPU: written, read and used by kernels, so that the host of a
/// rank that has batches waits for nothing.

#include <cuda_runtime.h>

#include <cstddef>
#include <span>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/device.hpp"
#include "lockstep/optim/constants.hpp"
#include "lockstep/optim/optimizer.hpp"
#include "lockstep/strategy/feature/join.hpp"

namespace lockstep::detail {

template <class T>
LOCKSTEP_KERNEL write_join_flags(T* flags, std::size_t count, std::size_t rank, bool is_live) {
  const std::size_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) flags[i] = join_flag<T>(i, rank, is_live);
}

/// One thread reads all: they are few, and it runs while other buckets travel.
template <class T>
LOCKSTEP_KERNEL read_flags(const T* flags, std::size_t count, double scale, LiveRanks* live) {
  *live = read_join_flags(flags, count, scale, live->lowest);
}

/// Divides by the live ranks instead of all: gradients count `world / live` times in the numbers of
/// every group.
template <class Rule>
LOCKSTEP_KERNEL count_live(const LiveRanks* live, double world, StepInputs<Rule>* inputs,
                           StepNumbers<Rule>* numbers, std::size_t groups) {
  const std::size_t group = threadIdx.x;
  if (group >= groups || live->count == 0) return;
  const double factor = world / static_cast<double>(live->count);
  inputs[group].scale *= factor;
  numbers[group].in_double.scale *= factor;
  numbers[group].in_float.scale = static_cast<float>(numbers[group].in_double.scale);
}

template <class R>
void count_live_ranks(Optimizer<R>, cudaStream_t stream, const LiveRanks* live, std::size_t world,
                      std::byte* inputs, std::byte* numbers, std::size_t groups) {
  launch_kernel<count_live<R>>("live ranks", stream, 1, static_cast<unsigned>(groups), live,
                               static_cast<double>(world), reinterpret_cast<StepInputs<R>*>(inputs),
                               reinterpret_cast<StepNumbers<R>*>(numbers), groups);
}

template <class Comm>
class JoinFlags<Cuda, Comm> {
 public:
  explicit JoinFlags(Comm& comm) : comm_(comm), live_(sizeof(LiveRanks)) {}

  template <class T>
  void write(std::span<T> flags, bool is_live) {
    constexpr unsigned threads = 128;
    launch_kernel<write_join_flags<SameElement<T>>>(
        "join flags", stream(), static_cast<unsigned>((flags.size() + threads - 1) / threads),
        threads, flags.data(), flags.size(), comm_.rank().value(), is_live);
  }
  template <class T>
  void read(std::span<T> flags, double scale) {
    launch_kernel<read_flags<SameElement<T>>>("join flags", stream(), 1, 1, flags.data(),
                                              flags.size(), scale, device_live());
    is_known_ = false;
  }

  /// The ranks of the latest round that was read. **Host** blocks until that round's first
  /// bucket has landed.
  const LiveRanks& live() const {
    if (!is_known_) {
      comm_.synchronize();
      copy_now(&known_, device_live(), sizeof known_);
      is_known_ = true;
    }
    return known_;
  }
  /// The same in device memory. **Stream** after the round was read.
  LiveRanks* device_live() const { return reinterpret_cast<LiveRanks*>(live_.data()); }

  /// No round has been since `lowest` was the lowest live rank. **Host** blocks.
  void reset(std::size_t lowest) {
    known_ = {0, lowest};
    is_known_ = true;
    comm_.synchronize();
    copy_now(device_live(), &known_, sizeof known_);
  }

 private:
  cudaStream_t stream() const { return comm_.gpu().stream(); }

  Comm& comm_;
  DeviceArena live_;
  mutable LiveRanks known_;
  mutable bool is_known_ = true;
};

}  // namespace lockstep::detail

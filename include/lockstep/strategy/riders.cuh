// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Who still has batches, on a GPU: written, read and used by kernels, so that the host of a
/// rank that has batches waits for nothing.

#include <cuda_runtime.h>

#include <cstddef>
#include <span>

#include "lockstep/bucket/riders.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/device.hpp"
#include "lockstep/optim/optimizer.hpp"
#include "lockstep/optim/constants.hpp"
#include "lockstep/strategy/riders.hpp"

namespace lockstep::detail {

template <class T>
LOCKSTEP_KERNEL write_riders(T* riders, std::size_t count, std::size_t rank, bool is_live) {
  const std::size_t at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) riders[at] = rider_of<T>(at, rank, is_live);
}

/// One thread reads all: they are few, and it runs while other buckets travel.
template <class T>
LOCKSTEP_KERNEL settle_riders(const T* riders, std::size_t count, double scale, LiveRanks* live) {
  *live = read_riders(riders, count, scale, live->lowest);
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

template <class Traits, class Comm>
class Riders<Cuda, Traits, Comm> {
 public:
  explicit Riders(Comm& comm) : comm_(comm), live_(sizeof(LiveRanks)) {
    require_riders<Traits>(comm.world_size(), comm.rank());
  }

  template <class T>
  void board(std::span<T> riders, bool is_live) {
    constexpr unsigned threads = 128;
    launch_kernel<write_riders<SameElement<T>>>(
        "riders", stream(), static_cast<unsigned>((riders.size() + threads - 1) / threads), threads,
        riders.data(), riders.size(), comm_.rank().value(), is_live);
  }
  template <class T>
  void settle(std::span<T> riders, double scale) {
    launch_kernel<settle_riders<SameElement<T>>>("riders", stream(), 1, 1, riders.data(),
                                                 riders.size(), scale, device_live());
    is_known_ = false;
  }

  /// The ranks of the latest round that was settled. **Host** blocks until that round's first
  /// bucket has landed.
  const LiveRanks& live() const {
    if (!is_known_) {
      comm_.synchronize();
      copy_now(&known_, device_live(), sizeof known_);
      is_known_ = true;
    }
    return known_;
  }
  /// The same in device memory. **Stream** after the round was settled.
  LiveRanks* device_live() const { return reinterpret_cast<LiveRanks*>(live_.data()); }

  /// No round has been since `lowest` was the lowest live rank. **Host** blocks.
  void begin_anew(std::size_t lowest = 0) {
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

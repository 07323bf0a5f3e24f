// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Plain device memory for communicators that need no other.

#include <cstddef>
#include <deque>
#include <span>

#include "lockstep/core/element.hpp"
#include "lockstep/device/cuda/memory.cuh"

namespace lockstep::detail {

/// Gives a communicator `allocate`.
class DeviceAllocating {
 public:
  /// `count` elements of the current GPU, zeroed. The memory lives as long as the communicator.
  /// **Ranks** this one.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    return {reinterpret_cast<T*>(arenas_.emplace_back(count * sizeof(T)).data()), count};
  }

 private:
  std::deque<DeviceArena> arenas_;
};

}  // namespace lockstep::detail

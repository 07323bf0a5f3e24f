// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Plain host memory for communicators that need no other.

#include <cstddef>
#include <span>
#include <vector>

#include "lockstep/core/element.hpp"
#include "lockstep/device/device.hpp"

namespace lockstep::detail {

/// Gives a communicator `allocate`.
class HostAllocating {
 public:
  /// `count` elements, zeroed. The memory lives as long as the communicator. **Ranks** any.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    return {reinterpret_cast<T*>(arenas_.emplace_back(count * sizeof(T)).data()), count};
  }

 private:
  std::vector<HostArena> arenas_;
};

}  // namespace lockstep::detail

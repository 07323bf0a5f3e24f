// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Memory that a communicator keeps for itself between calls.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/comm/passes.hpp"

namespace lockstep::detail {

/// Memory that grows with the largest call. Device memory comes from a communicator's `allocate`.
class Scratch {
 public:
  /// Memory that `comm` communicates best. **Ranks** as for `comm.allocate`.
  template <class T, class Comm>
  std::span<T> from(Comm& comm, std::size_t count) {
    if (allocated_.size() < count * sizeof(T))
      allocated_ = comm.template allocate<std::uint8_t>(std::bit_ceil(count * sizeof(T)));
    return {reinterpret_cast<T*>(allocated_.data()), count};
  }

  /// Host memory if `like` is host memory, else device memory of `comm`.
  template <class T, class Comm>
  std::span<T> like(const void* like, Comm& comm, std::size_t count) {
    if (passes_of(comm).is_device(like)) return from<T>(comm, count);
    return on_host<T>(count);
  }

  template <class T>
  std::span<T> on_host(std::size_t count) {
    if (host_.size() < count * sizeof(T)) host_.resize(count * sizeof(T));
    return {reinterpret_cast<T*>(host_.data()), count};
  }

 private:
  std::span<std::uint8_t> allocated_;
  std::vector<std::byte> host_;
};

}  // namespace lockstep::detail

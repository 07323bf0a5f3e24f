// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Memory that a communicator keeps for itself between calls.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lockstep::detail {

/// Memory for one purpose. It grows and is never freed before its communicator ends, because
/// freeing waits as allocating does.
class Scratch {
 public:
  bool holds(std::size_t bytes) const { return allocated_.size() >= bytes; }

  /// Takes `bytes` of memory that `comm` communicates best. A second time it takes half as much
  /// again at least, so that calls which grow slowly leave little behind. **Ranks** as for
  /// `comm.allocate`.
  template <class Comm>
  void grow(Comm& comm, std::size_t bytes) {
    if (holds(bytes)) return;
    allocated_ = comm.template allocate<std::uint8_t>(std::max(bytes, allocated_.size() / 2 * 3));
  }

  template <class T>
  std::span<T> get(std::size_t count) const {
    return {reinterpret_cast<T*>(allocated_.data()), count};
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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Memory that a communicator keeps for itself between calls.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/passes.hpp"

namespace lockstep::detail {

/// Is the memory of this communicator's passes the host's? There it can be allocated at any time.
template <class Comm>
inline constexpr bool works_on_host =
    std::is_same_v<std::remove_cvref_t<decltype(passes_of(std::declval<Comm&>()))>, HostPasses>;

/// Calls `allocate()`, which allocates memory of GPUs, while nothing is under way on any GPU of
/// this host: to allocate may wait for kernels of other GPUs, which wait for other hosts, of which
/// one may be about to allocate too. **Ranks** those of `inside`. **Host** blocks.
template <class Inside, class F>
void allocate_quietly(Inside& inside, const F& allocate) {
  if constexpr (works_on_host<Inside>) {
    allocate();
  } else {
    inside.barrier();  // its streams are empty
    allocate();
    inside.barrier();
  }
}

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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Elements on their way between the host's memory and a GPU's, which may become others on
/// the way.

#include <algorithm>
#include <cstddef>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/convert.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/host_arena.hpp"

namespace lockstep::detail {

/// Elements that keep their type are copied as they are. Others are converted on the host, through
/// a window of memory that is taken when it is first needed. **Host** blocks in every member; the
/// stream that uses the GPU's memory must be empty.
class HostStaging {
 public:
  static constexpr std::size_t window = 4_MiB;

  /// From the host to the GPU.
  void send(std::byte* to, ElementKind to_kind, const std::byte* from, ElementKind from_kind,
            std::size_t count) {
    if (to_kind == from_kind) return copy_now(to, from, count * element_size(to_kind));
    in_windows(to_kind, count, [&](std::size_t first, std::size_t some) {
      convert_elements(memory_.data(), to_kind, from + first * element_size(from_kind), from_kind,
                       some);
      copy_now(to + first * element_size(to_kind), memory_.data(), some * element_size(to_kind));
    });
  }

  /// From the GPU to the host.
  void receive(std::byte* to, ElementKind to_kind, const std::byte* from, ElementKind from_kind,
               std::size_t count) {
    if (to_kind == from_kind) return copy_now(to, from, count * element_size(to_kind));
    in_windows(from_kind, count, [&](std::size_t first, std::size_t some) {
      copy_now(memory_.data(), from + first * element_size(from_kind),
               some * element_size(from_kind));
      convert_elements(to + first * element_size(to_kind), to_kind, memory_.data(), from_kind,
                       some);
    });
  }

 private:
  /// Calls `f(first, some)` for as many elements of the GPU's type as fit the window, again and
  /// again.
  template <class F>
  void in_windows(ElementKind kind, std::size_t count, const F& f) {
    if (memory_.bytes() == 0) memory_ = HostArena(window);
    const std::size_t most = window / element_size(kind);
    for (std::size_t first = 0; first < count; first += most)
      f(first, std::min(most, count - first));
  }

  HostArena memory_{0};
};

}  // namespace lockstep::detail

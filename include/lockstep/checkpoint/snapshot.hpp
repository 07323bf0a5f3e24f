// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Copies of what a replica keeps, out of its memory and into it.

#include <cstddef>
#include <span>

#include "lockstep/checkpoint/state.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/device/device.hpp"

namespace lockstep::detail {

/// How a device copies. `out(copies)` copies what the pieces hold between two steps, `await()`
/// waits until it is there, and `in(piece, from)` writes a piece. `Memory` is where copies lie.
/// Specialised for every device: `Cpu` here, `Cuda` in kept_copies.cuh.
template <class Device, class Comm>
class StateCopies;

inline void copy_out_of_host(const StateCopy& copy) {
  const StateEntry& piece = *copy.piece;
  convert_elements(copy.to, piece.whole.element, piece.data, piece.held, piece.count);
}
inline void copy_into_host(const StateEntry& piece, const std::byte* from) {
  convert_elements(piece.data, piece.held, from, piece.whole.element, piece.count);
}

template <class Comm>
class StateCopies<Cpu, Comm> {
 public:
  using Memory = HostArena;

  constexpr explicit StateCopies(Comm&) {}

  static void out(std::span<const StateCopy> copies) {
    for (const StateCopy& copy : copies) copy_out_of_host(copy);
  }
  static constexpr void await() {}
  static void in(const StateEntry& piece, const std::byte* from) { copy_into_host(piece, from); }
};

}  // namespace lockstep::detail

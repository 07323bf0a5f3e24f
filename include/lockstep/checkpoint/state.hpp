// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A job's state as a list of entries: what checkpoints are made of.

#include "lockstep/core/element.hpp"
#include "lockstep/device/device.hpp"
#include "lockstep/model/tensor.hpp"

namespace lockstep::detail {

enum class StateRole : std::uint8_t {
  parameter,
  buffer,
  state,
  local,  ///< a state that every rank keeps for itself: of a hook, or of ranks that train alone
};

/// For what pieces are handed out. All ranks together save every piece once: parameters, buffers
/// that are the same on all ranks, and states that are, come from rank 0. Every rank loads all that
/// it keeps.
enum class StateUse : std::uint8_t { saving, loading };

/// A tensor in the memory of one rank, or the part of it that the rank keeps.
struct StateEntry {
  StateRole role = StateRole::parameter;
  std::size_t tensor = 0;  ///< the number of the parameter or buffer, as the model lists them
  std::string_view name;   ///< of the parameter or buffer
  std::string_view state;  ///< of the optimizer or a hook, where the role is that
  TensorInfo whole;        ///< the shape of the whole tensor, and its type in a file
  std::size_t first = 0;   ///< the place of the first element in the whole tensor
  std::size_t count = 0;   ///< elements
  std::byte* data = nullptr;
  ElementKind held = ElementKind::unsupported;  ///< the type of the elements at `data`
  bool on_host = true;                          ///< may the host read and write at `data`?
  /// Where the parameter is held a second time, in the type in which the model uses it: it is
  /// written beside `data`, and never read.
  std::byte* derived = nullptr;
  ElementKind derived_kind = ElementKind::unsupported;
  std::size_t rank = 0;  ///< who keeps it: a rank of DDP, or a replica of DP
  /// It lies in memory that all ranks share: rank 0 writes it, while no other rank is in a step.
  bool shared = false;
  /// Of a local state: a job of another number of ranks goes on with the mean of all ranks', not
  /// with their sum.
  bool averaged = false;

  /// It holds these elements.
  template <class T>
  void hold(std::span<T> values) {
    count = values.size();
    data = reinterpret_cast<std::byte*>(values.data());
    held = element_kind<T>();
  }

  constexpr bool is_whole() const { return count == whole.count(); }

  /// The bytes that it takes in a file.
  constexpr std::size_t file_bytes() const { return count * element_size(whole.element); }

  /// `n` of its elements, from its element `at` on.
  constexpr StateEntry part(std::size_t at, std::size_t n) const {
    StateEntry piece = *this;
    piece.first += at;
    piece.count = n;
    piece.data += at * element_size(held);
    if (derived != nullptr) piece.derived += at * element_size(derived_kind);
    return piece;
  }
};

/// A copy of a piece's elements, in the file's type, to `to`.
struct StateCopy {
  std::byte* to = nullptr;
  const StateEntry* piece = nullptr;
};

/// It is the same on all ranks.
struct JobShape {
  std::size_t world = 1;     ///< ranks that save or load together
  std::size_t replicas = 1;  ///< who have gradients of their own: ranks, or replicas of DP
  /// An update takes the sum of all replicas' gradients divided by this.
  double gradient_divisor = 1;
  std::size_t micro_batches = 1;   ///< of a step
  bool keeps_own_buffers = false;  ///< do replicas have buffers of their own?
  std::vector<std::string> policies;
  std::uint64_t fingerprint = 0;
};

/// How a device copies what a replica keeps. `out(copies)` copies what the pieces hold between two
/// steps, `await()` waits until it is there, and `in(piece, from)` writes a piece. `Memory` is
/// where copies lie. Specialised for every device: `Cpu` here, `Cuda` in snapshot.cuh.
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

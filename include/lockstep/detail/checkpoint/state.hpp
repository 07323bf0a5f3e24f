// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A job's state, of which checkpoints consist, as a list of entries.

#include "lockstep/detail/device/device.hpp"
#include "lockstep/detail/model/tensor.hpp"

namespace lockstep::detail {

enum class StateRole : std::uint8_t {
  parameter,
  buffer,
  state,
  local,  ///< a state of each rank: of a hook, or of ranks that train alone
};

/// When saving, all ranks together list every piece once: rank 0 lists what all ranks hold alike.
/// When loading, every rank lists all that it holds.
enum class StateUse : std::uint8_t { saving, loading };

/// A tensor in one rank's memory, or the part of it that the rank owns.
struct StateEntry {
  StateRole role = StateRole::parameter;
  std::size_t tensor = 0;  ///< index of the parameter or buffer in the model
  std::string_view name;   ///< of the parameter or buffer
  std::string_view state;  ///< of the optimizer or a hook, for these roles
  TensorInfo whole;        ///< the shape of the whole tensor, and its type in a file
  std::size_t first = 0;   ///< offset of the first element in the whole tensor
  std::size_t count = 0;
  std::byte* data = nullptr;
  ElementKind held = ElementKind::unsupported;  ///< element type at `data`
  bool on_host = true;                          ///< can the host access `data`?
  /// A second copy of the parameter, in the model's type: written with `data`, never read.
  std::byte* derived = nullptr;
  ElementKind derived_kind = ElementKind::unsupported;
  std::size_t rank = 0;  ///< the owner: a rank of DDP, or a replica of DP
  /// In memory that all ranks share: each rank loads a part of it.
  bool shared = false;
  /// For local states: a job with another number of ranks loads the mean over ranks, not the sum.
  bool averaged = false;

  template <class T>
  void hold(std::span<T> values) {
    count = values.size();
    data = reinterpret_cast<std::byte*>(values.data());
    held = element_kind<T>();
  }

  constexpr bool is_whole() const { return count == whole.count(); }

  constexpr std::size_t file_bytes() const { return count * element_size(whole.element); }

  /// `n` elements from its element `at` on.
  constexpr StateEntry part(std::size_t at, std::size_t n) const {
    StateEntry piece = *this;
    piece.first += at;
    piece.count = n;
    piece.data += at * element_size(held);
    if (derived != nullptr) piece.derived += at * element_size(derived_kind);
    return piece;
  }
};

/// Copies a piece's elements to `to`, in the file's type.
struct StateCopy {
  std::byte* to = nullptr;
  StateEntry piece;
};

/// The same on all ranks.
struct JobShape {
  std::size_t world = 1;     ///< ranks that save or load together
  std::size_t replicas = 1;  ///< with own gradients: ranks, or replicas of DP
  /// An update uses the sum of all replicas' gradients divided by this.
  double gradient_divisor = 1;
  bool keeps_own_buffers = false;  ///< do replicas have their own buffers?
  std::vector<std::string> policies;
  std::uint64_t fingerprint = 0;
};

/// Copies state between a device and the host: `out(copies)` between two steps, `await()` for their
/// completion, `in(piece, from)`; `Memory` holds the copies. `Cuda` is in snapshot.cuh.
template <class Device, class Comm>
class StateCopies;

inline void copy_out_of_host(const StateCopy& copy) {
  const StateEntry& piece = copy.piece;
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

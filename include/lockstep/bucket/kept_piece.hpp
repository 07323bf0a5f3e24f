// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a job keeps from step to step, piece by piece: the contents of its checkpoints.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "lockstep/core/element.hpp"
#include "lockstep/model/tensor.hpp"

namespace lockstep::detail {

enum class KeptRole : std::uint8_t {
  parameter,
  buffer,
  state,
  local,  ///< a state that every rank keeps for itself: of a hook, or of ranks that train alone
};

/// For what pieces are handed out. All ranks together save every piece once: parameters, buffers
/// that are the same on all ranks, and states that are, come from rank 0. Every rank loads all that
/// it keeps.
enum class KeptFor : std::uint8_t { saving, loading };

/// A tensor in the memory of one rank, or the part of it that the rank keeps.
struct KeptPiece {
  KeptRole role = KeptRole::parameter;
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

  constexpr bool is_whole() const { return count == whole.count(); }

  /// The bytes that it takes in a file.
  constexpr std::size_t file_bytes() const { return count * element_size(whole.element); }

  /// `n` of its elements, from its element `at` on.
  constexpr KeptPiece part(std::size_t at, std::size_t n) const {
    KeptPiece piece = *this;
    piece.first += at;
    piece.count = n;
    piece.data += at * element_size(held);
    if (derived != nullptr) piece.derived += at * element_size(derived_kind);
    return piece;
  }
};

/// A copy of a piece's elements, in the file's type, to `to`.
struct KeptCopy {
  std::byte* to = nullptr;
  const KeptPiece* piece = nullptr;
};

}  // namespace lockstep::detail

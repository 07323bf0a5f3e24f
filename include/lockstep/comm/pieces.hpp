// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The result of a gathering in which every rank brings another number of elements.

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/core/strong.hpp"

namespace lockstep {

/// Pieces of different lengths, one of each rank, one behind the other in rank order.
struct GatheredPieces {
  std::vector<std::size_t> counts;   // elements of each rank's piece
  std::vector<std::size_t> offsets;  // where each rank's piece begins

  /// Elements of all pieces together.
  std::size_t total() const { return counts.empty() ? 0 : offsets.back() + counts.back(); }
};

/// Pieces and their elements. On a rank that does not get the elements, `values` is empty.
template <class T>
struct Gathered : GatheredPieces {
  std::vector<T> values;

  /// The elements that a rank has brought.
  std::span<const T> of(Rank rank) const {
    return std::span<const T>(values).subspan(offsets[rank.value()], counts[rank.value()]);
  }
};

namespace detail {

inline GatheredPieces pieces_of(std::vector<std::size_t> counts) {
  GatheredPieces pieces{std::move(counts), {}};
  std::size_t begin = 0;
  for (const std::size_t count : pieces.counts) {
    pieces.offsets.push_back(begin);
    begin += count;
  }
  return pieces;
}

/// What a rank brings to such a gathering, and what it has to receive it with. Ranks tell each
/// other before any element moves.
struct Brought {
  std::uint64_t count = 0;
  std::uint64_t room = 0;       // elements that its out can hold
  std::uint64_t on_device = 0;  // 1 where its memory is a GPU's
};

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gathers of pieces of different lengths: ranks tell each other what they bring, and then
/// move it.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/combine.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"
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

namespace lockstep::detail {

/// One such gather of elements `T` through a communicator: to `root`, or to all ranks.
template <class Comm, class T>
class VariableGather {
 public:
  explicit VariableGather(Comm& comm, std::optional<Rank> root = std::nullopt)
      : comm_(comm), root_(root) {
    call_.kind = root ? CollectiveKind::gather_variable : CollectiveKind::all_gather_variable;
    call_.part_of = current_job_call();
    call_.element = element_kind<T>();
    call_.root = static_cast<std::uint16_t>(root.value_or(Rank{0}).value());
  }

  /// Into memory of its own, which is made once the counts are known.
  Gathered<T> into_new(std::span<const T> in) {
    if (passes_of(comm_).is_device(in.data())) {
      throw Error(call_.text(), "the elements are in device memory",
                  "give it device memory for the result too", comm_.rank());
    }
    Gathered<T> gathered{announce({in.size(), any_room, 0}), {}};
    if (takes()) gathered.values.resize(gathered.total());
    move(in, gathered.values, gathered, false);
    return gathered;
  }

  GatheredPieces into(std::span<const T> in, std::span<T> out) {
    const auto passes = passes_of(comm_);
    const bool on_device = passes.is_device(in.data()) || (takes() && passes.is_device(out.data()));
    bool device_somewhere = false;
    GatheredPieces pieces = announce(
        {in.size(), takes() ? out.size() : any_room, on_device ? 1u : 0u}, &device_somewhere);
    move(in, takes() ? out.first(pieces.total()) : std::span<T>(), pieces, device_somewhere);
    return pieces;
  }

 private:
  static constexpr auto any_room = static_cast<std::uint64_t>(-1);

  std::size_t world() const { return comm_.world_size().value(); }
  /// Does this rank get the elements?
  bool takes() const { return !root_ || comm_.rank() == *root_; }

  /// Ranks tell each other what they bring. Too little room on a rank is an error on all of them.
  GatheredPieces announce(const Brought& own, bool* device_somewhere = nullptr) {
    comm_.agree(call_);
    constexpr std::size_t numbers = 3;
    const std::uint64_t told[numbers] = {own.count, own.room, own.on_device};
    std::vector<std::uint64_t> all(numbers * world());
    comm_.all_gather(told, all);
    std::vector<std::size_t> counts(world());
    for (std::size_t w = 0; w < world(); ++w) counts[w] = all[numbers * w];
    GatheredPieces pieces = pieces_of(std::move(counts));
    for (std::size_t w = 0; w < world(); ++w) {
      if (all[numbers * w + 1] < pieces.total()) {
        throw Error(call_.text(),
                    "rank " + std::to_string(w) + " has room for " +
                        std::to_string(all[numbers * w + 1]) + " elements, and all ranks bring " +
                        std::to_string(pieces.total()),
                    "give it memory for all of them", comm_.rank());
      }
      if (device_somewhere != nullptr) *device_somewhere |= all[numbers * w + 2] != 0;
    }
    return pieces;
  }

  void move(std::span<const T> in, std::span<T> out, const GatheredPieces& pieces, bool on_device) {
    if (world() == 1) {
      comm_.all_gather(in, out);
    } else if (root_) {
      comm_.gather_pieces(in, out, pieces, *root_, on_device);
    } else {
      for (std::size_t w = 0; w < world(); ++w) {
        const std::span<T> piece = out.subspan(pieces.offsets[w], pieces.counts[w]);
        if (piece.empty()) continue;
        if (comm_.rank() == Rank{w}) passes_of(comm_).copy(in, piece);
        comm_.broadcast(piece, Rank{w});
      }
    }
  }

  Comm& comm_;
  std::optional<Rank> root_;
  Call call_;
};

}  // namespace lockstep::detail

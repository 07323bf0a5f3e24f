// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Parameters that go to all ranks from those that own them whole and have updated them.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/strategy/owned_tensors.hpp"

namespace lockstep::detail {

/// One broadcast for neighbours in the arena that have the same owner. **Stream** where the
/// communicator is ordered by one, all of it is enqueued.
template <class Traits, class Comm>
class TensorBroadcasts {
 public:
  TensorBroadcasts(Comm& comm, const typename Traits::layout& where, std::byte* parameters)
      : comm_(comm), parameters_(parameters) {
    const std::vector<std::size_t> owners = owners_of(where, comm.world_size().value());
    for (const TensorRun& run : TensorRuns(where).table) {
      const std::size_t owner = owners[run.parameter];
      const std::size_t end = run.offset + run.bytes;
      if (!pieces_.empty() && pieces_.back().owner == owner &&
          align_up(pieces_.back().end) == run.offset) {
        pieces_.back().end = end;
      } else {
        pieces_.push_back({run.offset, end, owner});
      }
    }
  }

  /// **Ranks** all, after their parameters have been updated.
  void start_all() const {
    for (const Piece& piece : pieces_) {
      auto* const data = reinterpret_cast<std::uint8_t*>(parameters_ + piece.begin);
      comm_.broadcast(std::span(data, piece.end - piece.begin), Rank{piece.owner},
                      step_call<Traits>());
    }
  }
  static constexpr bool is_pending() { return false; }
  static constexpr void wait_all() {}

 private:
  struct Piece {
    std::size_t begin = 0;  // bytes of the arena
    std::size_t end = 0;
    std::size_t owner = 0;
  };

  Comm& comm_;
  std::byte* parameters_;
  std::vector<Piece> pieces_;
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of DP that a checkpoint is made of, and that goes on from one: all replicas'
/// parts.

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/state.hpp"
#include "lockstep/optim/progress.hpp"

namespace lockstep::detail {

/// A base of `Self`, which has the replicas. The members are those of `ReplicaKept`; a piece's rank
/// is the number of its replica.
template <class Self>
class DpKept {
 public:
  void list_state(StateUse use, std::vector<StateEntry>& to) {
    for (std::size_t i = 0; i != self().replicas(); ++i) replica(i).list_state(use, to);
  }
  JobShape job_shape() const {
    JobShape shape = std::as_const(*self().replicas_[0]).replica().job_shape();
    shape.world = 1;
    return shape;
  }

  ReplicaProgress progress() const {
    return std::as_const(*self().replicas_[0]).replica().progress();
  }
  void set_progress(const ReplicaProgress& progress) {
    self().run([&](auto& replica) { replica.replica().set_progress(progress); });
  }

  /// Every replica copies its own pieces, on its own device.
  void copy_out(std::span<const StateCopy> copies) {
    std::vector<std::vector<StateCopy>> of(self().replicas());
    for (const StateCopy& copy : copies) of[copy.piece->rank].push_back(copy);
    self().run([&](auto& replica) { replica.replica().copy_out(of[replica.number()]); });
  }
  /// Not by the crew: steps may be going on.
  void await_copies() {
    for (std::size_t i = 0; i != self().replicas(); ++i) replica(i).await_copies();
  }
  void copy_in(const StateEntry& piece, const std::byte* from) {
    replica(piece.rank).copy_in(piece, from);
  }
  auto make_kept_memory(std::size_t bytes) const {
    return std::as_const(*self().replicas_[0]).replica().make_kept_memory(bytes);
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }
  auto& replica(std::size_t i) { return self().replicas_[i]->replica(); }
};

}  // namespace lockstep::detail

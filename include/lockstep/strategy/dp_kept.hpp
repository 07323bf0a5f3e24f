// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of DP that a checkpoint is made of, and that goes on from one: all replicas'
/// parts.

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/bucket/kept_piece.hpp"
#include "lockstep/optim/replica_progress.hpp"

namespace lockstep::detail {

/// A base of `Self`, which has the replicas. The members are those of `ReplicaKept`; a piece's rank
/// is the number of its replica.
template <class Self>
class DpKept {
 public:
  template <KeptFor For = KeptFor::saving, class F>
  void for_each_kept(const F& f) {
    for (std::size_t i = 0; i != self().replicas(); ++i) replica(i).template for_each_kept<For>(f);
  }

  ReplicaProgress progress() const {
    return std::as_const(*self().replicas_[0]).replica().progress();
  }
  void set_progress(const ReplicaProgress& progress) {
    self().run([&](auto& replica) { replica.replica().set_progress(progress); });
  }

  /// Every replica copies its own pieces, on its own device.
  void copy_out(std::span<const KeptCopy> copies) {
    std::vector<std::vector<KeptCopy>> of(self().replicas());
    for (const KeptCopy& copy : copies) of[copy.piece->rank].push_back(copy);
    self().run([&](auto& replica) { replica.replica().copy_out(of[replica.number()]); });
  }
  /// Not by the crew: steps may be going on.
  void await_copies() {
    for (std::size_t i = 0; i != self().replicas(); ++i) replica(i).await_copies();
  }
  void copy_in(const KeptPiece& piece, const std::byte* from) {
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

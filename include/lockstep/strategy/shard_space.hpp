// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The ranks among which `Sharding<ZeroRedundancy>` divides buckets: all of them, or those of
/// each group.

#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/strategy/reduction.hpp"
#include "lockstep/strategy/job_groups.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/shards.hpp"

namespace lockstep::detail {

/// The pieces of buckets: `Self` says how many shards there are, and which is this rank's.
template <class Self, class Traits>
class ShardPieces {
 public:
  /// The elements of a bucket of `count` that this rank owns.
  template <class T>
  Shard slice(std::size_t count) const {
    return shard_of<typename Traits::template sliced<T>>(count, self().shard(), self().shards());
  }
  /// All pieces of a bucket of `count` elements of T that begins at `data`: they reach into the
  /// room behind it. The elements at `data` may be of another type than the bucket's.
  template <class T, class Travelling>
  std::span<Travelling> pieces(Travelling* data, std::size_t count) const {
    return {data, shard_length<typename Traits::template sliced<T>>(count, self().shards()) *
                      self().shards()};
  }
  /// This rank's piece of them.
  template <class T>
  std::span<T> own_piece(std::span<T> pieces) const {
    const std::size_t length = pieces.size() / self().shards();
    return pieces.subspan(self().shard() * length, length);
  }

 private:
  const Self& self() const { return static_cast<const Self&>(*this); }
};

/// Who divides buckets with whom, and how their slices travel. Both calls get all pieces of a
/// bucket, one behind the other and of equal length, and return the handle of a call under way.
template <class Traits, class Comm>
class ShardSpace : public ShardPieces<ShardSpace<Traits, Comm>, Traits> {
 public:
  explicit ShardSpace(Comm& comm) : comm_(&comm) { require_shards(shards(), comm.rank()); }

  std::size_t shards() const { return comm_->world_size().value(); }
  /// The number of this rank's shard.
  std::size_t shard() const { return comm_->rank().value(); }
  /// Does this rank save what it keeps? No other rank keeps the same.
  static constexpr bool is_saved() { return true; }
  Comm& communicator() const { return *comm_; }

  /// This rank's piece = its average over ranks, or the sum as `gradient_reduction` says. **Ranks**
  /// all.
  template <class T>
  auto scatter(std::span<T> pieces) const {
    return comm_->reduce_scatter_async(
        pieces, this->own_piece(pieces),
        reduction_of_gradients<gradient_reduction<Traits, Comm>()>(shards()), step_call<Traits>());
  }

  /// Every piece = that of the rank that owns it. **Ranks** all.
  template <class T>
  auto gather(std::span<T> pieces) const {
    return comm_->all_gather_async(std::span<const T>(this->own_piece(pieces)), pieces,
                                   step_call<Traits>());
  }

  /// A number = its sum over the shards of all buckets. **Ranks** all. **Host** blocks.
  void add_others(double& number) const {
    comm_->all_reduce(std::span(&number, 1), Sum{}, step_call<Traits>());
  }

 private:
  Comm* comm_;
};

/// Two calls, one after the other: a piece of this rank's group, then its reduction across groups.
template <class Inside, class Across, class T, class Op>
class ScatterAcross {
 public:
  template <class Start>
  ScatterAcross(std::in_place_t, const Start& start, Across& across, std::span<T> own, Op op)
      : inside_(start()), across_(across), own_(own), op_(op) {}
  ScatterAcross(const ScatterAcross&) = delete;
  ScatterAcross& operator=(const ScatterAcross&) = delete;

  void wait() {
    inside_.wait();
    across_.all_reduce(own_, op_, step_call_of_thread());
  }
  void forget() { inside_.forget(); }

 private:
  Inside inside_;
  Across& across_;
  std::span<T> own_;
  Op op_;
};

/// With `Groups<Grid<W, G>>` buckets are divided inside of each group, and groups are replicas of
/// each other: a slice is scattered inside, reduced across, and gathered inside.
template <class Traits, class Comm>
  requires(Traits::shards_groups)
class ShardSpace<Traits, Comm> : public ShardPieces<ShardSpace<Traits, Comm>, Traits> {
  using Groups = JobGroupsOf<Traits, Comm>;
  static constexpr GradientReduction how = gradient_reduction<Traits, Comm>();

 public:
  explicit ShardSpace(Comm& comm)
      : comm_(&comm), topology_(topology_for<typename Traits::job_topology>(comm.world_size())) {
    require_shards(shards(), comm.rank());
  }
  /// The communicators of the groups, which come before the first call.
  void use(Groups& groups) { groups_ = &groups; }

  std::size_t shards() const { return topology_.group_size(topology_.group_rank(comm_->rank())); }
  std::size_t shard() const { return topology_.local_group_rank(comm_->rank()).value(); }
  /// All groups keep the same, which rank 0's group saves.
  bool is_saved() const {
    return topology_.group_rank(comm_->rank()) == topology_.group_rank(Rank{0});
  }
  Comm& communicator() const { return *comm_; }

  template <class T>
  auto scatter(std::span<T> pieces) const {
    const std::span<T> own = this->own_piece(pieces);
    const auto inside = reduction_of_gradients<how>(comm_->world_size().value());
    const auto across = reduction_of_gradients < how == GradientReduction::average
                            ? how
                            : GradientReduction::sum > (1);
    const auto start = [&] {
      return groups_->group().reduce_scatter_async(pieces, own, inside, step_call<Traits>());
    };
    return ScatterAcross<decltype(start()), std::remove_reference_t<decltype(groups_->across())>, T,
                         std::remove_const_t<decltype(across)>>(std::in_place, start,
                                                                groups_->across(), own, across);
  }
  template <class T>
  auto gather(std::span<T> pieces) const {
    return groups_->group().all_gather_async(std::span<const T>(this->own_piece(pieces)), pieces,
                                             step_call<Traits>());
  }
  void add_others(double& number) const {
    groups_->group().all_reduce(std::span(&number, 1), Sum{}, step_call<Traits>());
  }

 private:
  Comm* comm_;
  [[no_unique_address]] typename Traits::job_topology topology_;
  Groups* groups_ = nullptr;
};

}  // namespace lockstep::detail

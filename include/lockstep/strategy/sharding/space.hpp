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
#include "lockstep/strategy/job_groups.hpp"
#include "lockstep/strategy/reduction.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/sharding/shards.hpp"

namespace lockstep::detail {

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

/// Who divides buckets with whom, and how their slices travel. `scatter` and `gather` get all
/// pieces of a bucket, one behind the other and of equal length, and return the handle of a call
/// under way.
///
/// With `Groups<Grid<W, G>>` buckets are divided inside of each group, and groups are replicas of
/// each other: a slice is scattered inside, reduced across, and gathered inside.
template <class Traits, class Comm>
class ShardSpace {
  using Groups = JobGroupsOf<Traits, Comm>;
  static constexpr GradientReduction how = gradient_reduction<Traits, Comm>();

 public:
  explicit ShardSpace(Comm& comm) : comm_(&comm) {
    if constexpr (Traits::shards_groups) {
      const auto topology = topology_for<typename Traits::job_topology>(comm.world_size());
      const auto group = topology.group_rank(comm.rank());
      shards_ = topology.group_size(group);
      shard_ = topology.local_group_rank(comm.rank()).value();
      is_saved_ = group == topology.group_rank(Rank{0});
    } else {
      shards_ = comm.world_size().value();
      shard_ = comm.rank().value();
    }
    require_shards(shards_, comm.rank());
  }
  /// The communicators of the groups, which come before the first call.
  void use(Groups& groups) { groups_ = &groups; }

  Comm& communicator() const { return *comm_; }
  /// Does this rank save what it keeps? All groups keep the same, which rank 0's group saves.
  bool is_saved() const { return is_saved_; }

  /// The elements of a bucket of `count` that this rank owns.
  template <class T>
  Shard slice(std::size_t count) const {
    return shard_of<typename Traits::template sliced<T>>(count, shard_, shards_);
  }
  /// All pieces of a bucket of `count` elements of T that begins at `data`: they reach into the
  /// room behind it. The elements at `data` may be of another type than the bucket's.
  template <class T, class Travelling>
  std::span<Travelling> pieces(Travelling* data, std::size_t count) const {
    return {data, shard_length<typename Traits::template sliced<T>>(count, shards_) * shards_};
  }

  /// This rank's piece = its average over ranks, or the sum as `gradient_reduction` says. **Ranks**
  /// all.
  template <class T>
  auto scatter(std::span<T> pieces) const {
    const std::span<T> own = own_piece(pieces);
    const auto inside = reduction_of_gradients<how>(comm_->world_size().value());
    const auto start = [&] {
      return this->inside().reduce_scatter_async(pieces, own, inside, step_call<Traits>());
    };
    if constexpr (Traits::shards_groups) {
      constexpr auto then = how == GradientReduction::average ? how : GradientReduction::sum;
      const auto across = reduction_of_gradients<then>(1);
      return ScatterAcross<decltype(start()), std::remove_reference_t<decltype(groups_->across())>,
                           T, std::remove_const_t<decltype(across)>>(
          std::in_place, start, groups_->across(), own, across);
    } else {
      return start();
    }
  }
  /// Every piece = that of the rank that owns it. **Ranks** all.
  template <class T>
  auto gather(std::span<T> pieces) const {
    return inside().all_gather_async(std::span<const T>(own_piece(pieces)), pieces,
                                     step_call<Traits>());
  }
  /// A number = its sum over the shards of all buckets. **Ranks** all. **Host** blocks.
  void add_others(double& number) const {
    inside().all_reduce(std::span(&number, 1), Sum{}, step_call<Traits>());
  }

 private:
  /// The ranks that have the slices of a bucket.
  auto& inside() const {
    if constexpr (Traits::shards_groups) {
      return groups_->group();
    } else {
      return *comm_;
    }
  }
  template <class T>
  std::span<T> own_piece(std::span<T> pieces) const {
    const std::size_t length = pieces.size() / shards_;
    return pieces.subspan(shard_ * length, length);
  }

  Comm* comm_;
  Groups* groups_ = nullptr;
  std::size_t shards_;
  std::size_t shard_;  // the number of this rank's
  bool is_saved_ = true;
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The ranks among which `Sharding<ZeroRedundancy>` divides buckets: all of them.

#include <cstddef>
#include <span>

#include "lockstep/core/reduce_op.hpp"
#include "lockstep/strategy/gradient_reduction.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/shards.hpp"

namespace lockstep::detail {

/// Who divides buckets with whom, and how their slices travel. Both calls get all pieces of a
/// bucket, one behind the other and of equal length, and return the handle of a call under way.
template <class Traits, class Comm>
class ShardSpace {
 public:
  explicit ShardSpace(Comm& comm) : comm_(&comm) { require_shards(shards(), comm.rank()); }

  std::size_t shards() const { return comm_->world_size().value(); }
  /// The number of this rank's shard.
  std::size_t shard() const { return comm_->rank().value(); }
  Comm& communicator() const { return *comm_; }

  /// The elements of a bucket of `count` that this rank owns.
  template <class T>
  Shard slice(std::size_t count) const {
    return shard_of<typename Traits::template sliced<T>>(count, shard(), shards());
  }
  /// All pieces of a bucket of `count` elements of T that begins at `data`: they reach into the
  /// room behind it. The elements at `data` may be of another type than the bucket's.
  template <class T, class Travelling>
  std::span<Travelling> pieces(Travelling* data, std::size_t count) const {
    return {data, shard_length<typename Traits::template sliced<T>>(count, shards()) * shards()};
  }
  /// This rank's piece of them.
  template <class T>
  std::span<T> own_piece(std::span<T> pieces) const {
    const std::size_t length = pieces.size() / shards();
    return pieces.subspan(shard() * length, length);
  }

  /// This rank's piece = its average over ranks, or the sum as `gradient_reduction` says. **Ranks**
  /// all.
  template <class T>
  auto scatter(std::span<T> pieces) const {
    return comm_->reduce_scatter_async(
        pieces, own_piece(pieces),
        reduction_of_gradients<gradient_reduction<Traits, Comm>()>(shards()), step_call<Traits>());
  }

  /// Every piece = that of the rank that owns it. **Ranks** all.
  template <class T>
  auto gather(std::span<T> pieces) const {
    return comm_->all_gather_async(std::span<const T>(own_piece(pieces)), pieces,
                                   step_call<Traits>());
  }

  /// A number = its sum over the shards of all buckets. **Ranks** all. **Host** blocks.
  void add_others(double& number) const {
    comm_->all_reduce(std::span(&number, 1), Sum{}, step_call<Traits>());
  }

 private:
  Comm* comm_;
};

}  // namespace lockstep::detail

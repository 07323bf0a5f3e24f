// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The reductions of buckets of which each rank gets its slice alone.

#include <cstddef>
#include <span>
#include <utility>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/strategy/bucket_handles.hpp"
#include "lockstep/strategy/shard_space.hpp"

namespace lockstep::detail {

/// The calls that are under way, as `BucketReductions` has them for whole buckets.
template <class Traits, class Comm>
class ShardReductions {
  using Space = ShardSpace<Traits, Comm>;

 public:
  ShardReductions(Comm& comm, std::size_t buckets) : space_(comm), handles_(buckets) {}

  const Space& space() const { return space_; }

  /// Starts to reduce all pieces of a bucket: see `ShardSpace::pieces`.
  template <class T>
  void start(std::size_t bucket, std::span<T> pieces) {
    handles_.start(space_, bucket, pieces);
  }
  template <class T>
  void wait(std::size_t bucket) {
    handles_.template wait<T>(bucket);
  }
  template <class T>
  bool is_under_way(std::size_t bucket) const {
    return handles_.template is_under_way<T>(bucket);
  }
  void forget() { handles_.forget(); }

 private:
  struct Scatter {
    template <class T>
    static auto on(Space& space, std::span<T> pieces) {
      return space.scatter(pieces);
    }
  };

  template <std::size_t... K>
  static auto make_handles(std::index_sequence<K...>) -> BucketHandles<
      Scatter, Space, typename Traits::template travelling<ElementOf<Traits::kinds().kinds[K]>>...>;

  Space space_;
  decltype(make_handles(std::make_index_sequence<Traits::kinds().size>{})) handles_;
};

}  // namespace lockstep::detail

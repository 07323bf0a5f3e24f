// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The reductions of buckets of which each rank gets its slice alone.

#include <cstddef>
#include <span>
#include <type_traits>

#include "lockstep/strategy/reduction.hpp"
#include "lockstep/strategy/shard_space.hpp"

namespace lockstep::detail {

/// The calls that are under way, as `BucketReductions` has them for whole buckets.
template <class Traits, class Comm>
class ShardReductions {
  using Space = ShardSpace<Traits, Comm>;

 public:
  ShardReductions(Comm& comm, const auto& /*execution*/, const auto& layout)
      : space_(comm), handles_(layout.plan().bucket_count), whole_(comm, NoExecution{}, layout) {}

  const Space& space() const { return space_; }
  /// The communicators of groups, where buckets are divided inside of these.
  void use(auto& groups) { space_.use(groups); }

  /// Starts to reduce a bucket with parameters of T. The first one carries flags that all ranks
  /// read, where there are some, and is reduced whole.
  template <class T, class Travelling>
  void start(std::size_t bucket, std::span<Travelling> gradients) {
    if constexpr (Traits::joins) {
      if (bucket == 0) return whole_.start(space_.communicator(), bucket, gradients);
    }
    handles_.start(space_, bucket, space_.template pieces<T>(gradients.data(), gradients.size()));
  }
  template <class T>
  void wait(std::size_t bucket) {
    if constexpr (Traits::joins) {
      if (bucket == 0) return whole_.template wait<T>(bucket);
    }
    handles_.template wait<T>(bucket);
  }
  template <class T>
  bool is_under_way(std::size_t bucket) const {
    return handles_.template is_under_way<T>(bucket);
  }
  void forget() {
    handles_.forget();
    if constexpr (Traits::joins) whole_.forget();
  }

 private:
  struct NoExecution {};
  struct NoWhole {
    constexpr NoWhole(const auto&, const auto&, const auto&) {}
  };
  using Whole =
      typename std::conditional_t<Traits::joins, std::type_identity<BucketReductions<Traits, Comm>>,
                                  std::type_identity<NoWhole>>::type;

  struct Scatter {
    template <class T>
    static auto on(Space& space, std::span<T> pieces) {
      return space.scatter(pieces);
    }
  };

  Space space_;
  TravellingHandles<Scatter, Space, Traits> handles_;
  [[no_unique_address]] Whole whole_;
};

}  // namespace lockstep::detail

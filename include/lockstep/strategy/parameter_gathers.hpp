// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Parameters that come back from the ranks that have updated them, while the next step
/// begins.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/strategy/reduction.hpp"
#include "lockstep/strategy/shard_space.hpp"

namespace lockstep::detail {

/// How many calls of a job that shards may be under way at a time: half of them are reductions,
/// half are gathers.
template <class Comm>
inline constexpr std::size_t most_shards_under_way =
    std::max<std::size_t>(1, Comm::most_under_way / 2);

/// The gathers of the buckets whose slices have been updated. A forward pass waits for a bucket
/// when it asks for the first parameter of it; whatever else reads or writes parameters waits for
/// all.
template <class Traits, class Comm>
class ParameterGathers {
  using layout = typename Traits::layout;
  using Space = ShardSpace<Traits, Comm>;
  static constexpr std::size_t most_under_way = most_shards_under_way<Comm>;

 public:
  ParameterGathers(Comm& comm, const layout& where, std::byte* parameters)
      : layout_(where),
        parameters_(parameters),
        space_(comm),
        handles_(where.plan().bucket_count),
        pending_(make_kept_table<std::uint8_t, layout::count>(where.plan().bucket_count)) {}

  const Space& space() const { return space_; }
  /// The communicators of groups, where buckets are divided inside of these.
  void use(auto& groups) { space_.use(groups); }

  /// Starts the gathers of all buckets, the last first: it holds the parameters that forward needs
  /// first. **Ranks** all, after their slices have been updated.
  void start_all() {
    const std::size_t buckets = layout_.plan().bucket_count;
    for (std::size_t b = buckets; b-- != 0;) {
      if (b + most_under_way < buckets) wait(b + most_under_way);
      start(b);
    }
  }

  /// **Host** blocks until a bucket's parameters are new, or on a GPU the compute stream waits.
  void wait(std::size_t bucket) {
    if (pending_[bucket] != 0) finish(bucket);
  }
  /// The same for the bucket of one parameter; a frozen one is in none.
  void wait_for_parameter(std::size_t parameter) {
    if (parameter >= layout_.infos().size()) return;  // refused where its view is made
    const std::size_t bucket = layout_.plan().placements[parameter].bucket;
    if (bucket != no_bucket) wait(bucket);
  }
  bool is_pending() const {
    return std::ranges::any_of(pending_, [](std::uint8_t pending) { return pending != 0; });
  }
  void wait_all() {
    for (std::size_t b = layout_.plan().bucket_count; b-- != 0;) wait(b);
  }

  /// Drops the handles of a capture that failed.
  void forget() {
    handles_.forget();
    std::ranges::fill(pending_, std::uint8_t{0});
  }

 private:
  struct Gather {
    template <class T>
    static auto on(Space& space, std::span<T> pieces) {
      return space.gather(pieces);
    }
  };
  template <std::size_t... K>
  static auto make_handles(std::index_sequence<K...>)
      -> BucketHandles<Gather, Space, ElementOf<Traits::kinds().kinds[K]>...>;

  void start(std::size_t b) {
    const Bucket& bucket = layout_.plan().bucket_table[b];
    Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
      T* const data = reinterpret_cast<T*>(parameters_ + bucket.offset);
      handles_.start(space_, b, space_.template pieces<T>(data, bucket.count()));
    });
    pending_[b] = 1;
  }

  [[gnu::noinline]] void finish(std::size_t b) {
    pending_[b] = 0;
    Traits::with_element(layout_.plan().bucket_table[b].element,
                         [&]<class T>(std::type_identity<T>) { handles_.template wait<T>(b); });
  }

  const layout& layout_;
  std::byte* parameters_;
  Space space_;
  decltype(make_handles(std::make_index_sequence<Traits::kinds().size>{})) handles_;
  KeptTable<std::uint8_t, layout::count> pending_;  // by bucket
};

}  // namespace lockstep::detail

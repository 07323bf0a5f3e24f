// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Sharding<ZeroRedundancy>`: a rank gets the averages of its slices of buckets, updates
/// these, and gives the new parameters to all ranks while the next step begins.

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
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/sharding/host_shared.hpp"
#include "lockstep/strategy/sharding/replicated.hpp"
#include "lockstep/strategy/sharding/space.hpp"

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

/// `Sharding<ZeroRedundancy>`: a rank owns a slice of every bucket. It gets the averages of its
/// slices alone, and all ranks get the parameters of all slices afterwards.
template <class Traits, class Comm>
class OwnsShard : public OwnedParts<Traits> {
 public:
  static constexpr Pieces fused = Pieces::buckets;

  OwnsShard(Comm& comm, const typename Traits::layout& where, std::byte* parameters)
      : OwnedParts<Traits>(where), gathers_(comm, where, parameters) {
    for (std::size_t b = 0; b != where.plan().bucket_count; ++b) {
      const Bucket& bucket = where.plan().bucket_table[b];
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        this->template add<T>(b, bucket, gathers_.space().template slice<T>(bucket.count()));
      });
    }
  }

  template <Pieces, class Gradients>
  static void bring(Gradients& gradients, const auto& piece) {
    gradients.wait(piece.number);
  }
  template <class Gradients, class T, std::size_t Count>
  static auto averages(Gradients& gradients, const UpdatePiece<T, Count>& piece) {
    if constexpr (Traits::frees_gradients) {
      return gradients.template slice_averages<T>(piece.number, Shard{});
    } else {
      return gradients.template averages<T>(piece.offset, piece.bytes());
    }
  }
  template <class Gradients, class Consume>
  static void for_each_block(Gradients& gradients, const auto& piece, const Consume& consume) {
    gradients.wait(piece.number);
    consume(0, averages(gradients, piece));
  }
  static constexpr std::size_t first_of(const auto& /*piece*/) { return 0; }

  void sum_over_owners(double& sum) const { gathers_.space().add_others(sum); }
  /// A graph ends with all parameters here.
  void publish(bool /*was_fused*/) {
    gathers_.start_all();
    if constexpr (Traits::captures) gathers_.wait_all();
  }
  /// The parameters that come back from other ranks, bucket by bucket.
  auto& gathers() { return gathers_; }

 private:
  ParameterGathers<Traits, Comm> gathers_;
};

/// Which parameters a rank of the job updates.
template <class Traits, class Comm>
auto choose_owned() {
  if constexpr (Traits::shards) {
    return std::type_identity<OwnsShard<Traits, Comm>>{};
  } else if constexpr (Traits::shares_parameters) {
    return std::type_identity<OwnsSlice<Traits, Comm>>{};
  } else {
    return std::type_identity<OwnsAll<Traits, Comm>>{};
  }
}
template <class Traits, class Comm>
using OwnedBy = typename decltype(choose_owned<Traits, Comm>())::type;

}  // namespace lockstep::detail

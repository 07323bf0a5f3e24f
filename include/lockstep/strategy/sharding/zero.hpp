// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Sharding<ZeroRedundancy>`: a rank gets the averages of its slices of buckets, updates
/// these, and gives the new parameters to all ranks while the next step begins.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/bucket/buckets.hpp"
#include "lockstep/bucket/layout.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/bucket/step.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/model/tensor_list.hpp"
#include "lockstep/strategy/job_groups.hpp"
#include "lockstep/strategy/reduction.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/sharding/owned.hpp"
#include "lockstep/strategy/sharding/sharding.hpp"

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

/// Memory for the gradients of a few buckets, which the buckets of a backward pass take in turn,
/// and this rank's slices of all.
template <class Traits, class Comm, class Execution>
class GradientRing {
  using layout = typename Traits::layout;
  using Space = ShardSpace<Traits, Comm>;
  template <class T>
  using Travelling = typename Traits::template travelling<T>;

 public:
  /// One bucket is written, one travels, and one has room for what a model writes ahead. Where
  /// gradients may be missing, no bucket is known to be complete before backward ends, and all have
  /// room.
  static constexpr std::size_t most_slots = Traits::notes_usage ? dynamic : 3;

  GradientRing(Comm& comm, const layout& where)
      : layout_(where),
        space_(comm),
        holders_(std::min(most_slots, where.plan().bucket_count)),
        slices_(plan_slices()) {
    std::size_t largest = 0;
    for (const Bucket& bucket : where.plan().buckets()) largest = std::max(largest, bucket.bytes);
    slot_bytes_ = largest + room_behind_buckets<typename Traits::plan_rules>();
    const std::size_t widest = widest_ratio();
    memory_ = reinterpret_cast<std::byte*>(
        comm.template allocate<std::uint8_t>(slots() * slot_bytes_ * widest).data());
    travelling_ = memory_ + (widest == 1 ? 0 : slots() * slot_bytes_);
    forget_holders();
  }

  /// The bytes of gradients that this rank keeps, whatever a model has.
  std::size_t bytes() const { return slots() * slot_bytes_ * widest_ratio() + slices_.bytes(); }

  /// No bucket has a slot: a backward pass begins.
  void forget_holders() { std::ranges::fill(holders_, no_bucket); }
  /// How many buckets have memory at a time.
  std::size_t slots() const { return holders_.size(); }
  bool holds(std::size_t b) const { return holders_[b % slots()] == b; }
  /// The bucket in the slot that bucket `b` takes; `no_bucket` where the slot is free.
  std::size_t holder(std::size_t b) const { return holders_[b % slots()]; }
  void take(std::size_t b) { holders_[b % slots()] = b; }

  /// Where an arena would begin in which the bucket's gradients lie as the plan says.
  std::byte* arena_of(std::size_t b) const {
    return memory_ + (b % slots()) * slot_bytes_ - layout_.plan().bucket_table[b].offset;
  }

  /// The bucket's gradients as they travel: in the slot itself unless in another type.
  template <class T>
  std::span<Travelling<T>> travelling(std::size_t b) const {
    const std::size_t at = (b % slots()) * slot_bytes_ / sizeof(T) * sizeof(Travelling<T>);
    return {reinterpret_cast<Travelling<T>*>(travelling_ + at),
            layout_.plan().bucket_table[b].count()};
  }

  /// This rank's averages of a bucket, summed over micro-batches.
  template <class T>
  std::span<Travelling<T>> slice(std::size_t b) const {
    const Bucket& bucket = layout_.plan().bucket_table[b];
    const Shard own = space_.template slice<T>(bucket.count());
    return {reinterpret_cast<Travelling<T>*>(slices_.data() + slice_offsets_[b]), own.count()};
  }

  /// Zeroes what lies between the parameters of a bucket: another bucket's gradients were there.
  void clear_padding(Execution& execution, std::size_t b) const {
    std::byte* const arena = arena_of(b);
    for (const std::size_t p : layout_.plan().members(b)) {
      const Placement& placement = layout_.plan().placements[p];
      const std::size_t padding = align_up(placement.bytes) - placement.bytes;
      if (padding != 0) execution.zero(arena + placement.offset + placement.bytes, padding);
    }
  }

  /// A bucket has landed: its slice is kept, or added to that of earlier micro-batches.
  template <class T>
  void keep(Execution& execution, std::size_t b, bool adds) const {
    const Bucket& bucket = layout_.plan().bucket_table[b];
    const Shard own = space_.template slice<T>(bucket.count());
    const auto landed = travelling<T>(b).subspan(own.begin, own.count());
    const auto kept = slice<T>(b);
    if (landed.empty()) return;
    if (adds) {
      execution.add(kept, std::span<const Travelling<T>>(landed));
    } else {
      execution.copy(reinterpret_cast<std::byte*>(kept.data()),
                     reinterpret_cast<const std::byte*>(landed.data()), landed.size_bytes());
    }
  }

 private:
  /// Gradients that travel in another type lie in memory of their own.
  static constexpr std::size_t widest_ratio() {
    std::size_t ratio = 1;
    for (std::size_t k = 0; k != Traits::kinds().size; ++k) {
      Traits::with_element(Traits::kinds().kinds[k], [&]<class T>(std::type_identity<T>) {
        if constexpr (!std::is_same_v<T, Travelling<T>>)
          ratio = std::max(ratio, 1 + (sizeof(Travelling<T>) + sizeof(T) - 1) / sizeof(T));
      });
    }
    return ratio;
  }

  std::size_t plan_slices() {
    std::size_t bytes = 0;
    for (const Bucket& bucket : layout_.plan().buckets()) {
      slice_offsets_.push_back(bytes);
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        bytes += align_up(space_.template slice<T>(bucket.count()).count() * sizeof(Travelling<T>));
      });
    }
    return bytes;
  }

  const layout& layout_;
  Space space_;
  std::vector<std::size_t> holders_;        // the bucket in each slot
  std::vector<std::size_t> slice_offsets_;  // bytes, by bucket
  typename Execution::Arena slices_;
  std::size_t slot_bytes_ = 0;
  std::byte* memory_ = nullptr;
  std::byte* travelling_ = nullptr;
};

/// The calls that are under way, as `BucketReductions` has them for whole buckets.
template <class Traits, class Comm>
class ShardReductions {
  using Space = ShardSpace<Traits, Comm>;

 public:
  ShardReductions(Comm& comm, const auto& /*execution*/, const auto& layout)
      : space_(comm), handles_(layout.plan().bucket_count), whole_(Traits::joins ? 1 : 0) {}

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
    whole_.forget();
  }

 private:
  struct Scatter {
    template <class T>
    static auto on(Space& space, std::span<T> pieces) {
      return space.scatter(pieces);
    }
  };

  Space space_;
  TravellingHandles<Scatter, Space, Traits> handles_;
  TravellingHandles<ReduceWhole<Traits, Comm>, Comm, Traits> whole_;  // of the first bucket
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

/// A step that waits for parameters, bucket by bucket, when a model asks for the first of each.
template <class Model, class Bare, class Gradients, class Gathers>
class ShardedStep : public TrackedStep<Model, Bare, Gradients> {
  using Base = TrackedStep<Model, Bare, Gradients>;

 public:
  ShardedStep(const Bare& bare, Gradients& gradients, Gathers& gathers)
      : Base(bare, gradients), gradients_(&gradients), gathers_(&gathers) {}

  template <class Key>
  auto param(Key key) const {
    gathers_->wait_for_parameter(find_tensor<Model, TensorRole::parameter>(key).index);
    return Base::param(key);
  }
  template <class F>
  void for_each_parameter(F&& f) const {
    gathers_->wait_all();
    Base::for_each_parameter(f);
  }
  /// Waits for all parameters. Returns whether some were still under way.
  bool await_parameters() const {
    const bool were_pending = gathers_->is_pending();
    gathers_->wait_all();
    return were_pending;
  }

  /// A parameter's gradient, to write. Where a rank gives gradients away, memory is handed out for
  /// a few buckets at a time.
  template <class Key>
  auto grad(Key key) const {
    if constexpr (frees) {
      return gradients_->freed_gradient(key);
    } else {
      return Base::grad(key);
    }
  }
  template <class Key, class Value = std::initializer_list<double>>
  void set_grad(Key key, const Value& value) const {
    this->write_view(grad(key), key, value);
    this->ready(key);
  }
  template <class F>
  void for_each_gradient(F&& f) const {
    static_assert(!frees,
                  "lockstep: with Sharding<ZeroRedundancy, Gradients> no rank has all gradients; "
                  "use ZeroRedundancy alone to look at them");
    if constexpr (!frees) Base::for_each_gradient(f);
  }

 private:
  static constexpr bool frees = Gradients::frees;

  Gradients* gradients_;
  Gathers* gathers_;
};

template <class Traits, class Model, class Bare, class Gradients, class Updating>
auto choose_step() {
  if constexpr (Traits::shards) {
    using Gathers = std::remove_reference_t<decltype(std::declval<Updating&>().gathers())>;
    return std::type_identity<ShardedStep<Model, Bare, Gradients, Gathers>>{};
  } else if constexpr (Traits::tracks) {
    return std::type_identity<TrackedStep<Model, Bare, Gradients>>{};
  } else {
    return std::type_identity<Bare>{};
  }
}
/// The step that a model's forward and backward get.
template <class Traits, class Model, class Bare, class Gradients, class Updating>
using StepOf = typename decltype(choose_step<Traits, Model, Bare, Gradients, Updating>())::type;

}  // namespace lockstep::detail

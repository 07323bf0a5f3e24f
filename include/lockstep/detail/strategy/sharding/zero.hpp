// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Sharding<ZeroRedundancy>`: ranks update slices of buckets, and all-gather parameters.

#include "lockstep/detail/strategy/sharding/owned.hpp"

namespace lockstep::detail {

/// Slots for the gradients of a few buckets, used in turn, and this rank's slices of all buckets.
template <class Traits, class Comm, class Execution>
class GradientRing {
  using layout = typename Traits::layout;
  using Space = ShardSpace<Traits, Comm>;
  template <class T>
  using ReduceType = typename Traits::template reduce_type<T>;

 public:
  /// One bucket is written, one is in flight, and one has room for what a model writes ahead. Where
  /// gradients may be missing, no bucket is complete before backward ends, and all have slots.
  static constexpr std::size_t most_slots = Traits::notes_usage ? dynamic : 3;

  GradientRing(Comm& comm, const layout& where)
      : layout_(where),
        space_(comm, nullptr),
        holders_(std::min(most_slots, where.plan().bucket_count)),
        slices_(plan_slices()) {
    std::size_t largest = 0;
    for (const Bucket& bucket : where.plan().buckets()) largest = std::max(largest, bucket.bytes);
    slot_bytes_ = largest + Traits::plan_rules::room;
    const std::size_t widest = widest_ratio();
    memory_ = reinterpret_cast<std::byte*>(
        comm.template allocate<std::uint8_t>(slots() * slot_bytes_ * widest).data());
    reduce_ = memory_ + (widest == 1 ? 0 : slots() * slot_bytes_);
    forget_holders();
  }

  std::size_t bytes() const { return slots() * slot_bytes_ * widest_ratio() + slices_.bytes(); }

  /// A backward pass begins: no bucket has a slot.
  void forget_holders() { std::ranges::fill(holders_, no_bucket); }
  std::size_t slots() const { return holders_.size(); }
  bool holds(std::size_t b) const { return holders_[b % slots()] == b; }
  /// The bucket in the slot that bucket `b` uses; `no_bucket` if the slot is free.
  std::size_t holder(std::size_t b) const { return holders_[b % slots()]; }
  void take(std::size_t b) { holders_[b % slots()] = b; }

  /// Where an arena with the plan's layout would begin for the bucket's slot.
  std::byte* arena_of(std::size_t b) const {
    return memory_ + (b % slots()) * slot_bytes_ - layout_.plan().bucket_table[b].offset;
  }

  /// The bucket's gradients as they are reduced: in the slot, unless in another type.
  template <class T>
  std::span<ReduceType<T>> reduce_slot(std::size_t b) const {
    const std::size_t at = (b % slots()) * slot_bytes_ / sizeof(T) * sizeof(ReduceType<T>);
    return {reinterpret_cast<ReduceType<T>*>(reduce_ + at), layout_.plan().bucket_table[b].count()};
  }

  /// This rank's averages of a bucket, summed over micro-batches.
  template <class T>
  std::span<ReduceType<T>> slice(std::size_t b) const {
    const Bucket& bucket = layout_.plan().bucket_table[b];
    const Shard own = space_.template slice<T>(bucket.count());
    return {reinterpret_cast<ReduceType<T>*>(slices_.data() + slice_offsets_[b]), own.count()};
  }

  /// Zeroes the padding between parameters, where another bucket's gradients were.
  void clear_padding(Execution& execution, std::size_t b) const {
    std::byte* const arena = arena_of(b);
    for (const std::size_t p : layout_.plan().members(b)) {
      const Placement& placement = layout_.plan().placements[p];
      const std::size_t padding = align_up(placement.bytes) - placement.bytes;
      if (padding != 0) execution.zero(arena + placement.offset + placement.bytes, padding);
    }
  }

  /// Stores the slice of a reduced bucket, or adds it to that of earlier micro-batches.
  template <class T>
  void keep(Execution& execution, std::size_t b, bool adds) const {
    const Bucket& bucket = layout_.plan().bucket_table[b];
    const Shard own = space_.template slice<T>(bucket.count());
    const auto landed = reduce_slot<T>(b).subspan(own.begin, own.count());
    const auto kept = slice<T>(b);
    if (landed.empty()) return;
    if (adds) {
      execution.add(kept, std::span<const ReduceType<T>>(landed));
    } else {
      execution.copy(reinterpret_cast<std::byte*>(kept.data()),
                     reinterpret_cast<const std::byte*>(landed.data()), landed.size_bytes());
    }
  }

 private:
  /// Gradients that are reduced in another type need memory of their own.
  static constexpr std::size_t widest_ratio() {
    std::size_t ratio = 1;
    Traits::for_each_kind([&]<class T>(std::type_identity<T>) {
      if constexpr (!std::is_same_v<T, ReduceType<T>>)
        ratio = std::max(ratio, 1 + (sizeof(ReduceType<T>) + sizeof(T) - 1) / sizeof(T));
    });
    return ratio;
  }

  std::size_t plan_slices() {
    std::size_t bytes = 0;
    const auto add = [&]<class T>(std::type_identity<T>, const Bucket& bucket) {
      slice_offsets_.push_back(bytes);
      bytes += align_up(space_.template slice<T>(bucket.count()).count() * sizeof(ReduceType<T>));
    };
    Traits::for_each_typed(layout_.plan().buckets(), add);
    return bytes;
  }

  const layout& layout_;
  Space space_;
  std::vector<std::size_t> holders_;        // the bucket in each slot
  std::vector<std::size_t> slice_offsets_;  // bytes, by bucket
  typename Execution::Arena slices_;
  std::size_t slot_bytes_ = 0;
  std::byte* memory_ = nullptr;
  std::byte* reduce_ = nullptr;
};

/// The most pending reductions of a job that shards, and the most pending gathers.
template <class Comm>
inline constexpr std::size_t most_shards_in_flight =
    std::max<std::size_t>(1, Comm::most_in_flight / 2);

/// A rank owns a slice of every bucket, and gathers buckets from their owners.
template <class Traits, class Comm>
class OwnedShards : public OwnedParts<Traits> {
 public:
  static constexpr Pieces fused = Pieces::buckets;

  template <Pieces, class Gradients>
  static void bring(Gradients& gradients, const auto& piece) {
    gradients.wait(piece.number);
  }
  template <class Gradients, class T, std::size_t Count>
  static auto averages(Gradients& gradients, const UpdatePiece<T, Count>& piece) {
    if constexpr (Traits::frees_gradients)
      return gradients.template slice_averages<T>(piece.number);
    return gradients.template averages<T>(piece.offset, piece.bytes());
  }

  static constexpr std::size_t first_of(const auto& /*piece*/) { return 0; }
  void sum_over_owners(double& sum) const { space_.add_others(sum); }
  bool is_saved() const { return space_.is_saved(); }
  const auto& space() const { return space_; }

 protected:
  using Space = ShardSpace<Traits, Comm>;

  OwnedShards(Comm& comm, const typename Traits::layout& where, JobGroupsOf<Traits, Comm>* groups)
      : OwnedParts<Traits>(where), space_(comm, groups), gathers_(buckets()) {}

  std::size_t buckets() const { return this->layout_.plan().bucket_count; }
  /// Calls `f(type of elements, bucket)`.
  void with_bucket(std::size_t b, const auto& f) const {
    const Bucket& bucket = this->layout_.plan().bucket_table[b];
    Traits::with_element(bucket.element,
                         [&]<class T>(std::type_identity<T> type) { f(type, bucket); });
  }
  void wait_for_gather(std::size_t b) {
    with_bucket(
        b, [&]<class T>(std::type_identity<T>, const Bucket&) { gathers_.template wait<T>(b); });
  }

  template <class T>
  using Gather = decltype(std::declval<const Space&>().gather(std::declval<std::span<T>>()));

  Space space_;
  BucketSlots<Traits, Gather> gathers_;
};

/// After an update buckets are all-gathered one by one: forward waits for a bucket at its first
/// parameter, other readers and writers wait for all.
template <class Traits, class Comm>
class OwnsShard : public OwnedShards<Traits, Comm> {
  using layout = typename Traits::layout;
  using Shards = OwnedShards<Traits, Comm>;
  using Shards::buckets, Shards::gathers_, Shards::space_, Shards::with_bucket;

 public:
  OwnsShard(Comm& comm, const layout& where, std::byte* parameters,
            JobGroupsOf<Traits, Comm>* groups)
      : Shards(comm, where, groups),
        parameters_(parameters),
        pending_(make_small_table<std::uint8_t, layout::count>(buckets())) {
    for (std::size_t b = 0; b != buckets(); ++b) {
      with_bucket(b, [&]<class T>(std::type_identity<T>, const Bucket& bucket) {
        this->template add<T>(b, bucket, space_.template slice<T>(bucket.count()));
      });
    }
  }

  /// Starts to gather all buckets, the last first: forward needs it first. A captured step waits.
  void publish(bool /*was_fused*/) {
    constexpr std::size_t most = most_shards_in_flight<Comm>;
    for (std::size_t b = buckets(); b-- != 0;) {
      if (b + most < buckets()) await_bucket(b + most);
      start(b);
    }
    if constexpr (Traits::captures) await_parameters();
  }

  /// Waits for a trained parameter's bucket. **Host** blocks, or on a GPU the compute stream waits.
  void await_parameter(std::size_t parameter) {
    if (parameter >= this->layout_.infos().size()) return;  // rejected where its view is made
    const std::size_t bucket = this->layout_.plan().placements[parameter].bucket;
    if (bucket != no_bucket) await_bucket(bucket);
  }
  /// Waits for all buckets. Returns whether some were pending.
  bool await_parameters() {
    bool were_pending = false;
    for (std::size_t b = buckets(); b-- != 0;) {
      were_pending |= pending_[b] != 0;
      await_bucket(b);
    }
    return were_pending;
  }
  /// Drops the gathers of a failed capture.
  void forget() {
    gathers_.forget();
    std::ranges::fill(pending_, std::uint8_t{0});
  }

 private:
  void start(std::size_t b) {
    with_bucket(b, [&]<class T>(std::type_identity<T>, const Bucket& bucket) {
      T* const data = reinterpret_cast<T*>(parameters_ + bucket.offset);
      gathers_.template start<T>(
          b, [&] { return space_.gather(space_.template pieces<T>(data, bucket.count())); });
    });
    pending_[b] = 1;
  }
  void await_bucket(std::size_t b) {
    if (pending_[b] != 0) finish(b);
  }
  [[gnu::noinline]] void finish(std::size_t b) {
    [[maybe_unused]] const typename Traits::span span({"wait for parameters", b});
    pending_[b] = 0;
    this->wait_for_gather(b);
  }

  std::byte* parameters_;
  SmallTable<std::uint8_t, layout::count> pending_;  // by bucket
};

}  // namespace lockstep::detail

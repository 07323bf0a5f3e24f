// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gradients of which a rank keeps its slices alone: `Sharding<ZeroRedundancy, Gradients>`.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/frozen.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/strategy/sharding/space.hpp"

namespace lockstep::detail {

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
      with_ratio(Traits::kinds().kinds[k], ratio);
    }
    return ratio;
  }
  static constexpr void with_ratio(ElementKind kind, std::size_t& ratio) {
    Traits::with_element(kind, [&]<class T>(std::type_identity<T>) {
      if constexpr (!std::is_same_v<T, Travelling<T>>)
        ratio = std::max(ratio, 1 + (sizeof(Travelling<T>) + sizeof(T) - 1) / sizeof(T));
    });
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

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Where a replica's gradients lie: as the model writes them, and as they travel.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/strategy/gradient_ring.hpp"
#include "lockstep/strategy/riders.hpp"
#include "lockstep/strategy/shards.hpp"

namespace lockstep::detail {

/// Arenas that are laid out as the plan says: one for gradients, a second one for those of a pass
/// that adds, and another where they travel in another type. A rank that gives gradients away has a
/// ring of buckets instead.
template <class Traits, class Comm, class Execution>
class GradientMemory {
 protected:
  using layout = typename Traits::layout;
  template <class T>
  using Travelling = typename Traits::template travelling<T>;

 public:
  /// Where a model writes the gradients of a pass that adds nothing.
  std::byte* arena() const { return arena_; }
  /// Where a model writes the gradients of a pass that adds. Allocated at the first call.
  std::byte* second_arena() {
    if (!second_) second_.emplace(layout_.plan().bytes);
    return second_->data();
  }

  template <class T>
  std::span<T> own(std::size_t offset, std::size_t bytes) const {
    return elements_at<T>(arena_, offset, bytes);
  }

  /// Averages lie where the gradients are, unless they are reduced in another type.
  template <class T>
  std::span<Travelling<T>> averages(std::size_t offset, std::size_t bytes) const {
    return elements_at<Travelling<T>>(averages_, offset / sizeof(T) * sizeof(Travelling<T>),
                                      bytes / sizeof(T) * sizeof(Travelling<T>));
  }

  /// This rank's averages of a bucket of which it owns a slice.
  template <class T>
  std::span<Travelling<T>> slice_averages(std::size_t b, Shard slice) const {
    if constexpr (Traits::frees_gradients) return ring_.template slice<T>(b);
    const Bucket& bucket = layout_.plan().bucket_table[b];
    return averages<T>(bucket.offset, bucket.bytes).subspan(slice.begin, slice.count());
  }

  /// The gradients that were added up count `factor` times. No bucket is under way.
  void scale_own(double factor) {
    for (const Bucket& bucket : layout_.plan().buckets()) {
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        execution_.scale(own<T>(bucket.offset, bucket.bytes), factor);
      });
    }
  }

  /// The bytes of the gradients that this rank keeps.
  std::size_t bytes() const {
    if constexpr (Traits::frees_gradients) {
      return ring_.bytes();
    } else {
      return layout_.plan().bytes * (second_ ? 2 : 1);
    }
  }

 protected:
  GradientMemory(Comm& comm, Execution& execution, const layout& where)
      : comm_(comm),
        execution_(execution),
        layout_(where),
        ring_(comm, where),
        arena_(make_arena()),
        averages_(make_travelling_arena()) {}

  /// Takes all memory now that steps will need: to allocate later may wait for other ranks' GPUs.
  void foresee() {
    if constexpr (Traits::micro_batches > 1 && !Traits::frees_gradients) second_arena();
    if constexpr (requires { comm_.reserve(std::size_t{1}); }) {
      std::size_t most = 0;
      for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) {
        const Bucket& bucket = layout_.plan().bucket_table[b];
        const std::size_t count = bucket.count() + riders_behind<Traits>(b, comm_.world_size());
        Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
          most = std::max(most, count * sizeof(Accumulator<Travelling<T>>));
        });
      }
      comm_.reserve(most);
    }
  }

  template <class T>
  std::span<T> piece_of(std::byte* arena, std::size_t parameter) const {
    const Placement& placement = layout_.plan().placements[parameter];
    return elements_at<T>(arena, placement.offset, placement.bytes);
  }

  /// The gradient of a parameter where the model has just written it, in a pass that adds or not.
  template <class T>
  std::span<T> written(std::size_t parameter, bool adds) const {
    if constexpr (Traits::frees_gradients)
      return piece_of<T>(ring_.arena_of(layout_.plan().placements[parameter].bucket), parameter);
    return piece_of<T>(adds ? second_->data() : arena_, parameter);
  }

  /// A bucket's gradients where the model has written them, and where they travel, with so many
  /// elements behind it.
  template <class T>
  std::span<T> own_gradients(std::size_t b, std::size_t more) const {
    const Bucket& bucket = layout_.plan().bucket_table[b];
    if constexpr (Traits::frees_gradients)
      return elements_at<T>(ring_.arena_of(b), bucket.offset, bucket.bytes);
    return own<T>(bucket.offset, bucket.bytes + more * sizeof(T));
  }
  template <class T>
  std::span<Travelling<T>> travelling_gradients(std::size_t b, std::size_t more) const {
    const Bucket& bucket = layout_.plan().bucket_table[b];
    if constexpr (Traits::frees_gradients) return ring_.template travelling<T>(b);
    return averages<T>(bucket.offset, bucket.bytes + more * sizeof(T));
  }

 private:
  std::byte* make_arena() {
    if constexpr (Traits::frees_gradients) {
      return nullptr;
    } else {
      return reinterpret_cast<std::byte*>(
          comm_.template allocate<std::uint8_t>(layout_.plan().bytes).data());
    }
  }

  std::byte* make_travelling_arena() {
    std::byte* arena = arena_;
    if constexpr (Traits::frees_gradients) return arena;
    Traits::with_element(
        layout_.plan().bucket_table[0].element, [&]<class T>(std::type_identity<T>) {
          if constexpr (!std::is_same_v<T, Travelling<T>>) {
            arena = reinterpret_cast<std::byte*>(
                comm_.template allocate<Travelling<T>>(layout_.plan().bytes / sizeof(T)).data());
          }
        });
    return arena;
  }

  /// What stands in for a ring where gradients stay whole.
  struct NoRing {
    constexpr NoRing(Comm&, const layout&) {}
  };
  using Ring =
      typename std::conditional_t<Traits::frees_gradients,
                                  std::type_identity<GradientRing<Traits, Comm, Execution>>,
                                  std::type_identity<NoRing>>::type;

 protected:
  Comm& comm_;
  Execution& execution_;
  const layout& layout_;
  [[no_unique_address]] Ring ring_;
  std::byte* arena_;

 private:
  std::byte* averages_;
  std::optional<typename Execution::Arena> second_;
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The pieces of an arena that a GPU's updater goes over: all of it, or this rank's shards.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/layout.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/bucket/runs.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/strategy/shards.hpp"

namespace lockstep::detail {

/// Elements that lie together, of a bucket or of a run of buckets.
template <class T, std::size_t Count>
struct UpdatePiece {
  [[no_unique_address]] Size<Count> count;
  std::size_t number;  // of its bucket or run, by its place in the arena
  std::size_t offset;  // bytes from the arena's start
};

/// The pieces of a pass: those of buckets, which land one by one, or of runs, which are longer.
enum class Pieces : std::uint8_t { buckets, runs };

// Two classes say which elements a rank updates. `for_each<What>(f)` calls `f(piece)` for the
// pieces of them, also for empty ones. What the rank keeps of each element beside the parameter
// itself lies packed in arenas of their own: an element at `offset` of the parameters' arena is at
// `kept(offset)` of `kept_bytes()`, where those arenas have elements of the same size. `for_each_of
// (parameter, f)` calls `f(first, count, offset)` for the elements of a parameter that are kept.

/// Every rank updates all elements.
template <class Traits>
class WholePieces {
  using layout = typename Traits::layout;

 public:
  explicit WholePieces(const layout& where) : layout_(where), runs_(where) {}

  /// Counts are constants where shapes are.
  template <Pieces What, class F>
  void for_each(const F& f) const {
    if constexpr (has_constants<What>()) {
      constexpr auto pieces = pieces_of<What>(layout::plan(), LayoutRuns<layout>::table);
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        (f(UpdatePiece<ElementOf<pieces[I].element>, pieces[I].count()>{{}, I, pieces[I].offset}),
         ...);
      }(std::make_index_sequence<pieces.size()>{});
    } else {
      std::size_t number = 0;
      for (const auto& piece : pieces_of<What>(layout_.plan(), runs_.table)) {
        Traits::with_element(piece.element, [&]<class T>(std::type_identity<T>) {
          f(UpdatePiece<T, dynamic>{Size<dynamic>{piece.count()}, number++, piece.offset});
        });
      }
    }
  }

  std::size_t kept_bytes() const { return layout_.plan().bytes; }
  static constexpr std::size_t kept(std::size_t offset) { return offset; }

  template <class F>
  void for_each_of(std::size_t parameter, const F& f) const {
    f(std::size_t{0}, layout_.infos()[parameter].count(),
      layout_.plan().placements[parameter].offset);
  }

 private:
  /// With more pieces than this, kernels for each size would cost the compiler more than they save.
  static constexpr std::size_t most_kernels = 32;

  template <Pieces What>
  static constexpr auto pieces_of(const auto& plan, const auto& runs) {
    if constexpr (What == Pieces::buckets) {
      return plan.buckets();
    } else {
      return std::span<const Run>(runs.begin(), runs.end());
    }
  }

  template <Pieces What>
  static constexpr bool has_constants() {
    if constexpr (layout::is_static) {
      return pieces_of<What>(layout::plan(), LayoutRuns<layout>::table).size() <= most_kernels;
    } else {
      return false;
    }
  }

  const layout& layout_;
  [[no_unique_address]] LayoutRuns<layout> runs_;
};

/// A rank updates its shard of every bucket. Shards lie apart, so that a run has no longer ones.
template <class Traits>
class ShardPieces {
  using layout = typename Traits::layout;

 public:
  /// `slice_of(element, count)` gives this rank's elements of a bucket.
  template <class SliceOf>
  ShardPieces(const layout& where, const SliceOf& slice_of) : layout_(where) {
    for (const Bucket& bucket : where.plan().buckets()) {
      const std::size_t size = element_size(bucket.element);
      const Shard own = slice_of(bucket.element, bucket.count());
      shards_.push_back(
          {bucket.offset + own.begin * size, bucket.offset + own.end * size, kept_bytes_});
      kept_bytes_ += own.count() * size;
    }
  }

  template <Pieces, class F>
  void for_each(const F& f) const {
    for (std::size_t b = 0; b != shards_.size(); ++b) {
      Traits::with_element(layout_.plan().bucket_table[b].element,
                           [&]<class T>(std::type_identity<T>) {
                             const Size<dynamic> count{shards_[b].bytes() / sizeof(T)};
                             f(UpdatePiece<T, dynamic>{count, b, shards_[b].begin});
                           });
    }
  }

  std::size_t kept_bytes() const { return kept_bytes_; }
  std::size_t kept(std::size_t offset) const {
    const auto after =
        std::upper_bound(shards_.begin(), shards_.end(), offset,
                         [](std::size_t place, const Part& shard) { return place < shard.begin; });
    const Part& shard = *(after == shards_.begin() ? after : after - 1);
    return shard.kept + (offset - shard.begin);
  }

  template <class F>
  void for_each_of(std::size_t parameter, const F& f) const {
    const Placement& where = layout_.plan().placements[parameter];
    const Part& shard = shards_[where.bucket];
    const std::size_t begin = std::max(where.offset, shard.begin);
    const std::size_t end = std::min(where.offset + where.bytes, shard.end);
    const std::size_t size = element_size(layout_.infos()[parameter].element);
    if (begin < end) f((begin - where.offset) / size, (end - begin) / size, begin);
  }

 private:
  /// This rank's part of a bucket: bytes of the arena, and where they are kept.
  struct Part {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::size_t kept = 0;
    constexpr std::size_t bytes() const { return end - begin; }
  };

  const layout& layout_;
  std::vector<Part> shards_;  // by bucket
  std::size_t kept_bytes_ = 0;
};

}  // namespace lockstep::detail

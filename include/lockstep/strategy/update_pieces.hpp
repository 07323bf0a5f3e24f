// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The pieces of an arena that a GPU's updater goes over: all of it, or those that the rank
/// owns.

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
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/strategy/shards.hpp"

namespace lockstep::detail {

/// Elements that lie together, of a bucket or of a run of buckets.
template <class T, std::size_t Count>
struct UpdatePiece {
  [[no_unique_address]] Size<Count> count;
  std::size_t number;  // of its bucket or run
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
  static constexpr std::size_t within(std::size_t offset) { return offset; }

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

/// A rank updates some elements: its shard of every bucket, or whole parameters.
template <class Traits>
class OwnedPieces {
  using layout = typename Traits::layout;

 public:
  explicit OwnedPieces(const layout& where) : layout_(where) {}

  /// Adds the bytes [begin, end) of the arena, which are part of a bucket and lie behind all that
  /// were added before.
  void add(std::size_t bucket, std::size_t begin, std::size_t end) {
    const bool goes_on =
        !parts_.empty() && parts_.back().bucket == bucket && align_up(parts_.back().end) == begin;
    if (goes_on) {
      kept_bytes_ += end - parts_.back().end;
      parts_.back().end = end;
    } else {
      kept_bytes_ = align_up(kept_bytes_, shard_alignment);
      parts_.push_back({begin, end, kept_bytes_, bucket});
      kept_bytes_ += end - begin;
    }
  }

  /// Runs have no longer pieces than buckets have.
  template <Pieces, class F>
  void for_each(const F& f) const {
    for (const Part& part : parts_) {
      Traits::with_element(layout_.plan().bucket_table[part.bucket].element,
                           [&]<class T>(std::type_identity<T>) {
                             const Size<dynamic> count{(part.end - part.begin) / sizeof(T)};
                             f(UpdatePiece<T, dynamic>{count, part.bucket, part.begin});
                           });
    }
  }

  /// A multiple of `shard_alignment`: states follow each other.
  std::size_t kept_bytes() const { return align_up(kept_bytes_, shard_alignment); }
  std::size_t kept(std::size_t offset) const {
    const Part& part = part_at(offset);
    return part.kept + (offset - part.begin);
  }
  /// The bytes between the beginning of the piece that holds `offset` and this.
  std::size_t within(std::size_t offset) const { return offset - part_at(offset).begin; }

  template <class F>
  void for_each_of(std::size_t parameter, const F& f) const {
    const Placement& where = layout_.plan().placements[parameter];
    const std::size_t size = element_size(layout_.infos()[parameter].element);
    auto part = std::partition_point(parts_.begin(), parts_.end(), [&](const Part& before) {
      return before.end <= where.offset;
    });
    for (; part != parts_.end() && part->begin < where.offset + where.bytes; ++part) {
      const std::size_t begin = std::max(where.offset, part->begin);
      const std::size_t end = std::min(where.offset + where.bytes, part->end);
      f((begin - where.offset) / size, (end - begin) / size, begin);
    }
  }

 private:
  /// Bytes of the arena, and where they are kept.
  struct Part {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::size_t kept = 0;
    std::size_t bucket = 0;
  };

  const Part& part_at(std::size_t offset) const {
    const auto after =
        std::upper_bound(parts_.begin(), parts_.end(), offset,
                         [](std::size_t place, const Part& part) { return place < part.begin; });
    return *(after == parts_.begin() ? after : after - 1);
  }

  const layout& layout_;
  std::vector<Part> parts_;
  std::size_t kept_bytes_ = 0;
};

}  // namespace lockstep::detail

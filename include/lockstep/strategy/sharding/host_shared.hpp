// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Sharding<HostShared>`: a rank updates its slices of parameters that ranks share.

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

#include "lockstep/bucket/plan.hpp"
#include "lockstep/bucket/runs.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/device/device.hpp"
#include "lockstep/strategy/reduction.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/sharding/replicated.hpp"
#include "lockstep/strategy/sharding/shards.hpp"

namespace lockstep::detail {

/// The parts of an arena that a rank owns, and what it keeps of them, one behind the other.
template <class Traits>
class OwnedParts {
  using layout = typename Traits::layout;

 public:
  template <Pieces, class F>
  void for_each(const F& f) const {
    for (const Part& part : parts_) {
      Traits::with_element(part.element, [&]<class T>(std::type_identity<T>) {
        const Size<dynamic> count{(part.end - part.begin) / sizeof(T)};
        f(UpdatePiece<T, dynamic>{count, part.number, part.begin});
      });
    }
  }

  /// A multiple of the alignment: states follow each other.
  std::size_t kept_bytes() const { return align_up(kept_bytes_, alignment); }
  std::size_t kept(std::size_t offset) const {
    const auto after =
        std::upper_bound(parts_.begin(), parts_.end(), offset,
                         [](std::size_t place, const Part& part) { return place < part.begin; });
    const Part& part = *(after == parts_.begin() ? after : after - 1);
    return part.kept + (offset - part.begin);
  }
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
      if (begin < end) f((begin - where.offset) / size, (end - begin) / size, begin);
    }
  }

 protected:
  explicit OwnedParts(const layout& where) : layout_(where) {}

  /// The rank owns these elements of a run or bucket, which lies behind all that were added before.
  template <class T>
  void add(std::size_t number, const auto& piece, Shard own) {
    kept_bytes_ = align_up(kept_bytes_, alignment);
    parts_.push_back({piece.offset + own.begin * sizeof(T), piece.offset + own.end * sizeof(T),
                      kept_bytes_, number, piece.element});
    kept_bytes_ += own.count() * sizeof(T);
  }

  const layout& layout_;

 private:
  /// States begin as memory does on the host, and on a GPU as shards do.
  static constexpr std::size_t alignment =
      std::is_same_v<typename Traits::device, Cpu> ? arena_alignment : shard_alignment;

  /// Bytes of the arena, and where they are kept.
  struct Part {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::size_t kept = 0;
    std::size_t number = 0;
    ElementKind element = ElementKind::unsupported;
  };

  std::vector<Part> parts_;
  std::size_t kept_bytes_ = 0;
};

/// `Sharding<HostShared>`: a rank owns a slice of every run of the parameters, which lie in memory
/// that ranks share. Its gradients are reduced in the pass that consumes them, after which all
/// ranks have new parameters.
template <class Traits, class Comm>
class OwnsSlice : public OwnedParts<Traits> {
  using layout = typename Traits::layout;

 public:
  static constexpr Pieces fused = Pieces::runs;

  OwnsSlice(Comm& comm, const layout& where, std::byte* /*parameters*/)
      : OwnedParts<Traits>(where), comm_(comm), runs_(where) {
    std::size_t number = 0;
    for (const Run& run : runs_.table) {
      Traits::with_element(run.element, [&]<class T>(std::type_identity<T>) {
        const auto [begin, end] = comm.template slice<T>(run.count());
        this->template add<T>(number++, run, {begin, end});
      });
    }
  }

  /// Averages take the place of this rank's own gradients, which no other rank reads: each reads
  /// its slice of them.
  template <Pieces, class Gradients, class T, std::size_t Count>
  void bring(Gradients& gradients, const UpdatePiece<T, Count>& piece) const {
    for_each_block(gradients, piece, Keep<T>{averages(gradients, piece).data() - first_of(piece)});
  }
  template <class Gradients, class T, std::size_t Count>
  static std::span<T> averages(Gradients& gradients, const UpdatePiece<T, Count>& piece) {
    return gradients.template own<T>(piece.offset, piece.bytes());
  }
  template <class Gradients, class T, std::size_t Count, class Consume>
  void for_each_block(Gradients& gradients, const UpdatePiece<T, Count>& piece,
                      const Consume& consume) const {
    const Run& run = runs_.table.begin()[piece.number];
    comm_.reduce_slice(gradients.template own<T>(run.offset, run.bytes),
                       reduction_of_gradients<gradient_reduction<Traits, Comm>()>(1), consume,
                       step_call<Traits>());
  }
  template <class T, std::size_t Count>
  std::size_t first_of(const UpdatePiece<T, Count>& piece) const {
    return (piece.offset - runs_.table.begin()[piece.number].offset) / sizeof(T);
  }

  void sum_over_owners(double& sum) const {
    comm_.all_reduce(std::span(&sum, 1), Sum{}, step_call<Traits>());
  }
  void publish(bool was_fused) const {
    if (!was_fused) comm_.barrier(step_call<Traits>());
  }

 private:
  template <class T>
  struct Keep {
    T* to;
    void operator()(std::size_t at, std::span<const T> averages) const {
      if (averages.data() != to + at) std::copy(averages.begin(), averages.end(), to + at);
    }
  };

  Comm& comm_;
  [[no_unique_address]] LayoutRuns<layout> runs_;
};

}  // namespace lockstep::detail

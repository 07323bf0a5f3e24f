// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The parameters that a rank updates: all, or its slices of shared ones (`HostShared`).

#include "lockstep/detail/strategy/reduction.hpp"

namespace lockstep::detail {

/// Contiguous elements of T, of a bucket or of a run of buckets.
template <class T, std::size_t Count>
struct UpdatePiece {
  [[no_unique_address]] Size<Count> count;
  std::size_t number;  // of its bucket or run
  std::size_t offset;  // bytes from the arena's start

  std::size_t bytes() const { return count.value() * sizeof(T); }
};

/// The pieces of a pass: buckets, which are reduced one by one, or longer runs of buckets.
enum class Pieces : std::uint8_t { buckets, runs };

// Four classes, one for each way to divide parameters, say which elements a rank updates.
// - `for_each<What>(f)` calls `f(piece)` for their pieces, also for empty ones.
// - What a rank keeps of each element beside the parameter lies packed in arenas of
//   `state_bytes()`, for elements of the parameter's size: at `kept(offset)` for the element at
//   `offset`. `for_each_of(parameter, f)` calls `f(first, count, offset)` for a parameter's kept
//   elements.
// - `bring<What>(gradients, piece)` reduces a piece, or waits for its reduction, before
//   `averages(gradients, piece)`. A pass over the pieces `fused` may do both: `for_each_block`,
//   where it exists, passes averages to `consume(at, averages)` while they are in the cache.
//   Indices `at` of a piece begin with `first_of(piece)`.
// - `sum_over_owners` completes a sum over owned elements; `publish` gives new parameters to all
//   ranks, where the fused pass (`was_fused`) has not.
// - `await_parameter(p)` and `await_parameters()` wait for other ranks' updates, and `forget()`
//   drops these. `is_saved`: does this rank save the slices that it keeps?

/// For classes whose parameters are complete when an update returns.
struct OwnedAtOnce {
  static constexpr void await_parameter(std::size_t) {}
  static constexpr bool await_parameters() { return false; }
  static constexpr void forget() {}
  static constexpr bool is_saved() { return true; }
};

/// `Sharding<Replicated>`: a rank owns all parameters. A reduced bucket has all averages.
template <class Traits, class Comm>
class OwnsAll : public OwnedAtOnce {
  using layout = typename Traits::layout;
  static constexpr bool on_gpu = std::is_same_v<typename Traits::device, Cuda>;

 public:
  /// Agreement on usage has waited for all buckets: a GPU then gets fewer kernels with runs.
  static constexpr Pieces fused =
      Traits::reduces && !(on_gpu && Traits::notes_usage) ? Pieces::buckets : Pieces::runs;

  OwnsAll(Comm&, const layout& where, std::byte* /*parameters*/, const auto* /*groups*/)
      : layout_(where) {}

  /// Counts are constants where shapes are static and pieces are few.
  template <Pieces What, class F>
  void for_each(const F& f) const {
    if constexpr (has_constants<What>()) {
      constexpr auto pieces = pieces_of<What>(layout::plan());
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        (f(UpdatePiece<ElementOf<pieces[I].element>, pieces[I].count()>{{}, I, pieces[I].offset}),
         ...);
      }(std::make_index_sequence<pieces.size()>{});
    } else {
      std::size_t number = 0;
      for (const auto& piece : pieces_of<What>(layout_.plan())) {
        Traits::with_element(piece.element, [&]<class T>(std::type_identity<T>) {
          f(UpdatePiece<T, dynamic>{Size<dynamic>{piece.count()}, number++, piece.offset});
        });
      }
    }
  }

  std::size_t state_bytes() const { return layout_.plan().bytes; }
  static constexpr std::size_t kept(std::size_t offset) { return offset; }
  void for_each_of(std::size_t parameter, const auto& f) const {
    f(std::size_t{0}, layout_.infos()[parameter].count(),
      layout_.plan().placements[parameter].offset);
  }

  template <Pieces What, class Gradients, class T, std::size_t Count>
  void bring(Gradients& gradients, const UpdatePiece<T, Count>& piece) const {
    if constexpr (What == Pieces::buckets) {
      gradients.wait(piece.number);
    } else if constexpr (Traits::reduces) {
      const Run& run = layout_.plan().run_table[piece.number];
      for (std::size_t b = 0; b != run.buckets; ++b) gradients.wait(run.first_bucket + b);
    }
  }
  template <class Gradients, class T, std::size_t Count>
  static auto averages(Gradients& gradients, const UpdatePiece<T, Count>& piece) {
    return gradients.template averages<T>(piece.offset, piece.bytes());
  }
  static constexpr std::size_t first_of(const auto& /*piece*/) { return 0; }

  static constexpr void sum_over_owners(double&) {}
  static constexpr void publish(bool /*was_fused*/) {}

 private:
  /// More constants would cost the compiler more than they save; a host gains with one piece only.
  static constexpr std::size_t most_constants = on_gpu ? 32 : 1;

  template <Pieces What>
  static constexpr auto pieces_of(const auto& plan) {
    if constexpr (What == Pieces::buckets) {
      return plan.buckets();
    } else {
      return plan.runs();
    }
  }
  template <Pieces What>
  static constexpr bool has_constants() {
    if constexpr (layout::is_static)
      return pieces_of<What>(layout::plan()).size() <= most_constants;
    return false;
  }

  const layout& layout_;
};

/// A rank's elements of a run or bucket. Of no template, so that all jobs have one search for it.
struct OwnedPart {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t kept = 0;
  std::size_t number = 0;
  ElementKind element = ElementKind::unsupported;
};

template <class Traits>
class OwnedParts {
  using layout = typename Traits::layout;

 public:
  template <Pieces, class F>
  void for_each(const F& f) const {
    for (const OwnedPart& part : parts_) {
      Traits::with_element(part.element, [&]<class T>(std::type_identity<T>) {
        const Size<dynamic> count{(part.end - part.begin) / sizeof(T)};
        f(UpdatePiece<T, dynamic>{count, part.number, part.begin});
      });
    }
  }

  /// A multiple of the alignment, because states follow each other.
  std::size_t state_bytes() const { return align_up(state_bytes_, alignment); }
  std::size_t kept(std::size_t offset) const {
    const auto after = std::ranges::upper_bound(parts_, offset, {}, &OwnedPart::begin);
    const OwnedPart& part = *(after == parts_.begin() ? after : after - 1);
    return part.kept + (offset - part.begin);
  }
  void for_each_of(std::size_t parameter, const auto& f) const {
    const Placement& where = layout_.plan().placements[parameter];
    const std::size_t size = element_size(layout_.infos()[parameter].element);
    auto part = std::ranges::upper_bound(parts_, where.offset, {}, &OwnedPart::end);
    for (; part != parts_.end() && part->begin < where.offset + where.bytes; ++part) {
      const std::size_t begin = std::max(where.offset, part->begin);
      const std::size_t end = std::min(where.offset + where.bytes, part->end);
      if (begin < end) f((begin - where.offset) / size, (end - begin) / size, begin);
    }
  }

 protected:
  explicit OwnedParts(const layout& where) : layout_(where) {}

  /// Adds the rank's elements of a run or bucket, which lies behind all earlier ones, with room for
  /// `length` elements.
  template <class T>
  void add(std::size_t number, const auto& piece, Shard own, std::size_t length = 0) {
    state_bytes_ = align_up(state_bytes_, alignment);
    parts_.push_back({piece.offset + own.begin * sizeof(T), piece.offset + own.end * sizeof(T),
                      state_bytes_, number, piece.element});
    state_bytes_ += std::max(own.count(), length) * sizeof(T);
  }

  const layout& layout_;

 private:
  /// States are aligned as memory is on the host, and as shards are on a GPU.
  static constexpr std::size_t alignment =
      std::is_same_v<typename Traits::device, Cpu> ? arena_alignment : shard_alignment;

  std::vector<OwnedPart> parts_;
  std::size_t state_bytes_ = 0;
};

/// `Sharding<HostShared>`: a rank owns a slice of every run of the parameters, in memory that ranks
/// share. The pass that reduces a slice updates it, after which all ranks have new parameters.
template <class Traits, class Comm>
class OwnsSlice : public OwnedParts<Traits>, public OwnedAtOnce {
  using layout = typename Traits::layout;

 public:
  static constexpr Pieces fused = Pieces::runs;

  OwnsSlice(Comm& comm, const layout& where, std::byte* /*parameters*/, const auto* /*groups*/)
      : OwnedParts<Traits>(where), comm_(comm) {
    std::size_t number = 0;
    const auto add = [&]<class T>(std::type_identity<T>, const Run& run) {
      const auto [begin, end] = comm.template slice<T>(run.count());
      this->template add<T>(number++, run, {begin, end});
    };
    Traits::for_each_typed(where.plan().runs(), add);
  }

  /// Averages replace this rank's own gradients in its slice, which no other rank reads.
  template <Pieces, class Gradients, class T, std::size_t Count>
  void bring(Gradients& gradients, const UpdatePiece<T, Count>& piece) const {
    T* const to = averages(gradients, piece).data() - first_of(piece);
    for_each_block(gradients, piece, [to](std::size_t at, std::span<const T> averages) {
      if (averages.data() != to + at) std::copy(averages.begin(), averages.end(), to + at);
    });
  }
  template <class Gradients, class T, std::size_t Count>
  static std::span<T> averages(Gradients& gradients, const UpdatePiece<T, Count>& piece) {
    return gradients.template own<T>(piece.offset, piece.bytes());
  }
  template <class Gradients, class T, std::size_t Count, class Consume>
  void for_each_block(Gradients& gradients, const UpdatePiece<T, Count>& piece,
                      const Consume& consume) const {
    const Run& run = this->layout_.plan().run_table[piece.number];
    comm_.reduce_slice(gradients.template own<T>(run.offset, run.bytes),
                       reduction_of_gradients<gradient_reduction<Traits, Comm>()>(1), consume,
                       step_call<Traits>());
  }
  template <class T, std::size_t Count>
  std::size_t first_of(const UpdatePiece<T, Count>& piece) const {
    return (piece.offset - this->layout_.plan().run_table[piece.number].offset) / sizeof(T);
  }

  void sum_over_owners(double& sum) const {
    comm_.all_reduce(std::span(&sum, 1), Sum{}, step_call<Traits>());
  }
  void publish(bool was_fused) const {
    if (!was_fused) comm_.barrier(step_call<Traits>());
  }

 private:
  Comm& comm_;
};

}  // namespace lockstep::detail

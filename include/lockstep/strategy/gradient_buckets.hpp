// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A replica's gradients: written into buckets, summed over micro-batches, averaged over
/// ranks.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/checked.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/model/lookup.hpp"
#include "lockstep/strategy/bucket_reductions.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/gradient_reduction.hpp"
#include "lockstep/strategy/gradient_ring.hpp"
#include "lockstep/strategy/parameter_gathers.hpp"
#include "lockstep/strategy/readiness.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/shard_reductions.hpp"
#include "lockstep/strategy/written_check.hpp"

namespace lockstep::detail {

/// Are gradients of a micro-batch reduced over ranks, or kept until those of a later one are?
enum class Sync : std::uint8_t { no, yes };

/// How a backward pass treats its gradients.
struct BackwardPass {
  bool synchronizes = false;  ///< buckets are reduced over ranks as they complete
  bool adds = false;          ///< gradients are added to those of earlier micro-batches
};

/// The gradients of backward passes. The model writes gradients and marks each as ready; in a pass
/// that synchronizes, a bucket's reduction starts with its last gradient, buckets strictly in
/// order.
///
/// A pass that adds writes into a second arena, and `ready` adds each gradient to the first arena
/// while it is still in the cache: models only ever overwrite, and nothing is ever zeroed.
template <class Traits, class Comm, class Execution>
class GradientBuckets {
  using layout = typename Traits::layout;
  template <class T>
  using Travelling = typename Traits::template travelling<T>;

 public:
  using Usage = typename Traits::Usage;

  /// How gradients are reduced, and whether a factor is left to those that read the result.
  static constexpr GradientReduction how = gradient_reduction<Traits, Comm>();
  static constexpr bool frees = Traits::frees_gradients;
  static constexpr bool folds =
      how == GradientReduction::folded_sum || how == GradientReduction::folded_sum_of_halves;

  GradientBuckets(Comm& comm, Execution& execution, const layout& where)
      : comm_(comm),
        execution_(execution),
        layout_(where),
        ring_(comm, where),
        arena_(make_arena()),
        averages_(travelling_arena()),
        check_(comm),
        readiness_(where),
        reductions_(make_reductions(comm, where.plan().bucket_count)),
        used_(make_kept_table<std::uint8_t, layout::count>(where.infos().size())) {
    static_assert(GradientSource<GradientBuckets>);
    foresee();
  }

  /// Where a model writes the gradients of a pass that adds nothing.
  std::byte* arena() const { return arena_; }
  /// Where a model writes the gradients of a pass that adds. Allocated at the first call.
  std::byte* second_arena() {
    if (!second_) second_.emplace(layout_.plan().bytes);
    return second_->data();
  }

  // A backward pass.

  void begin_backward(BackwardPass pass) {
    if constexpr (Traits::frees_gradients) {
      reduce();
      ring_.forget_holders();
    }
    pass_ = pass;
    next_ = 0;
    readiness_.reset();
    if constexpr (is_checked && !Traits::frees_gradients) spoil();
  }

  /// A parameter's gradient, where memory is handed out bucket by bucket.
  template <class Key>
  auto freed_gradient(Key key)
    requires(Traits::frees_gradients)
  {
    layout_.require_trained(key);
    const std::size_t parameter =
        find_tensor<typename Traits::model, TensorRole::parameter>(key).index;
    const std::size_t b = parameter < layout_.infos().size()
                              ? layout_.plan().placements[parameter].bucket
                              : 0;  // refused where its view is made
    if (!ring_.holds(b)) claim(b, parameter);
    return layout_.template view<typename Traits::memory, false>(ring_.arena_of(b), key);
  }

  /// The gradient of a parameter is complete.
  template <class Tensor>
  void ready(Tensor tensor) {
    readiness_.mark(tensor.index);
    with_element_of(tensor, [&]<class T>(std::type_identity<T>) {
      if constexpr (is_checked)
        check_.inspect(tensor.index, std::span<const T>(written<T>(tensor.index)));
      if constexpr (Traits::weighs_shares) {
        if (weight_ != 1) execution_.scale(written<T>(tensor.index), weight_);
      }
      if constexpr (!Traits::frees_gradients) {
        if (pass_.adds)
          execution_.add(piece_of<T>(arena_, tensor.index),
                         std::span<const T>(written<T>(tensor.index)));
      }
    });
    start_complete_buckets();
  }

  void end_backward() {
    if constexpr (is_checked) require_written();
    if constexpr (Traits::skips_unused) {
      take_missing_as_zero();
    } else if (!readiness_.all_ready()) {
      throw Error("backward", "no gradient came for " + readiness_.missing_names(),
                  "let backward write and mark every parameter, or add UnusedParameters<Zero>");
    }
    // A graph of a micro-batch ends with all that it began.
    if constexpr (Traits::frees_gradients && Traits::captures) reduce();
  }

  /// A pass in which this rank has no samples: its gradients are zero, and it uses no parameter.
  void pass_without_samples(BackwardPass pass) {
    begin_backward(pass);
    take_missing_as_zero();
  }

  /// The gradients of later passes are multiplied by `weight` before they are averaged over ranks.
  /// Weights have a mean of 1 over ranks.
  void weigh(double weight)
    requires(Traits::weighs_shares)
  {
    weight_ = weight;
  }

  /// Starts the reductions of gradients whose passes did not synchronize.
  void start_late() {
    if constexpr (Traits::frees_gradients) return;  // every pass has reduced its own
    pass_.synchronizes = true;
    next_ = 0;
    start_complete_buckets();
  }

  // For updaters: see GradientSource.

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

  /// **Host** blocks.
  void wait(std::size_t b) {
    if constexpr (!Traits::alone) {
      const Bucket& bucket = layout_.plan().bucket_table[b];
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        if constexpr (Traits::frees_gradients) {
          if (!reductions_.template is_under_way<Travelling<T>>(b)) return;
          reductions_.template wait<Travelling<T>>(b);
          ring_.template keep<T>(execution_, b, pass_.adds);
        } else if constexpr (Traits::reduces_early) {
          reductions_.template wait<Travelling<T>>(b);
        } else {
          comm_.all_reduce(own<T>(bucket.offset, bucket.bytes),
                           reduction_of_gradients<how>(comm_.world_size().value()), JobCall::step);
        }
      });
    }
  }

  /// **Host** blocks.
  void reduce() {
    for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) wait(b);
  }

  /// Reduces, and makes the results averages where a factor was left to those that read them: the
  /// program may look at them now. **Host** blocks.
  void average() {
    reduce();
    if constexpr (Traits::shards) gather_averages();
    if constexpr (folds) {
      const auto& plan = layout_.plan();
      for (std::size_t b = 0; factor() != 1 && b != plan.bucket_count; ++b) {
        const Bucket& bucket = plan.bucket_table[b];
        Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
          execution_.scale(averages<T>(bucket.offset, bucket.bytes), factor());
        });
      }
    }
  }

  /// The factor that makes averages of what `reduce` leaves.
  double factor() const { return folded_factor(how, comm_.world_size().value()); }

  /// **Host** blocks. Waits for the buckets under way first: a communicator that finishes them
  /// inside of another call no longer knows their types.
  const Usage& agree_on_usage() {
    if constexpr (Traits::reduces_early) reduce();
    if constexpr (!Traits::alone) comm_.all_reduce(used_, Max{}, JobCall::step);
    return used_;
  }

  // After a step.

  /// No parameter has been used since the last update.
  void forget_usage() {
    if constexpr (Traits::skips_unused) std::ranges::fill(used_, std::uint8_t{0});
  }

  /// A job goes on from another one: the arena is zero, no parameter has been used, and all
  /// gradients count as there, as after a backward pass.
  void begin_anew() {
    if constexpr (Traits::frees_gradients) {
      ring_.clear(execution_);
    } else {
      execution_.zero(arena_, layout_.plan().bytes);
    }
    forget_usage();
    readiness_.reset();
    for (std::size_t p = 0; p != layout_.infos().size(); ++p) {
      if (layout_.plan().is_trained(p)) readiness_.mark(p);
    }
  }
  /// Has this rank used a parameter since the last update? Where nobody keeps count, it has.
  bool is_used([[maybe_unused]] std::size_t parameter) const {
    if constexpr (Traits::skips_unused) return used_[parameter] != 0;
    return true;
  }
  void note_used(std::size_t parameter) { used_[parameter] = 1; }

  /// Drops the handles of all reductions: they belong to a failed capture and will never run.
  void forget_reductions() { reductions_.forget(); }

  /// The bytes of the gradients that this rank keeps.
  std::size_t bytes() const {
    if constexpr (Traits::frees_gradients) {
      return ring_.bytes();
    } else {
      return layout_.plan().bytes * (second_ ? 2 : 1);
    }
  }

 private:
  /// What stands in for a ring where gradients stay whole.
  struct NoRing {
    constexpr NoRing(Comm&, const layout&) {}
  };
  using Ring =
      typename std::conditional_t<Traits::frees_gradients,
                                  std::type_identity<GradientRing<Traits, Comm, Execution>>,
                                  std::type_identity<NoRing>>::type;

  std::byte* make_arena() {
    if constexpr (Traits::frees_gradients) {
      return nullptr;
    } else {
      return reinterpret_cast<std::byte*>(
          comm_.template allocate<std::uint8_t>(layout_.plan().bytes).data());
    }
  }

  /// Gives a bucket its memory, which an earlier one may have: that one has travelled first.
  [[gnu::noinline]] void claim(std::size_t b, std::size_t parameter) {
    const std::size_t earlier = ring_.holder(b);
    if (b >= next_ + ring_.slots())
      refuse_gradient(parameter, " was asked for before those of later layers were complete");
    if (earlier != no_bucket) {
      if (earlier > b) refuse_gradient(parameter, " was asked for when its bucket had been sent");
      wait(earlier);
    }
    ring_.take(b);
    ring_.clear_padding(execution_, b);
    if constexpr (is_checked) {
      for (const std::size_t p : layout_.plan().members(b)) spoil(p);
    }
  }
  [[noreturn, gnu::cold, gnu::noinline]] void refuse_gradient(std::size_t parameter,
                                                              std::string_view when) const {
    fail("backward", {"the gradient of ", layout_.name(parameter), when},
         "write gradients last layer first, and ask for each when it is written; "
         "Sharding<ZeroRedundancy, Gradients> keeps few at a time");
  }

  /// Takes all memory now that steps will need: to allocate later may wait for other ranks' GPUs.
  void foresee() {
    if constexpr (Traits::micro_batches > 1 && !Traits::frees_gradients) second_arena();
    if constexpr (requires { comm_.reserve(std::size_t{1}); }) {
      std::size_t most = 0;
      for (const Bucket& bucket : layout_.plan().buckets()) {
        Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
          most = std::max(most, bucket.count() * sizeof(Accumulator<Travelling<T>>));
        });
      }
      comm_.reserve(most);
    }
  }

  using Check =
      std::conditional_t<is_checked, WrittenCheck<typename Traits::device>, NoWrittenCheck>;

  // The checked mode.

  void spoil() {
    if (pass_.adds) second_arena();
    for (std::size_t p = 0; p != layout_.infos().size(); ++p) {
      if (layout_.plan().is_trained(p)) spoil(p);
    }
  }
  void spoil(std::size_t p) {
    Traits::with_element(layout_.infos()[p].element,
                         [&]<class T>(std::type_identity<T>) { check_.spoil(written<T>(p)); });
  }

  void require_written() {
    const auto found = check_.take();
    if (!found) return;
    const auto& info = layout_.infos()[found->parameter];
    std::string place;  // the indices of the element, the last first
    std::size_t rest = found->element;
    for (std::size_t axis = info.rank; axis-- > 0; rest /= info.extents[axis])
      place.insert(0, (axis == 0 ? "" : ", ") + std::to_string(rest % info.extents[axis]));
    fail("backward",
         {"the gradient of ", layout_.name(found->parameter),
          " was marked ready, and its element (", place, ") had not been written"},
         "write every element with =, before step.ready; += adds to what nobody has cleared");
  }

  /// Calls `f` with the type of a parameter's elements, which is a constant for declared ones.
  template <class Tensor, class F>
  void with_element_of(Tensor tensor, const F& f) const {
    if constexpr (std::is_same_v<Tensor, ListedTensor>) {
      Traits::with_element(layout_.infos()[tensor.index].element, f);
    } else {
      f(std::type_identity<ElementOf<Traits::parameter_types::of(Tensor::info.element)>>{});
    }
  }

  template <class T>
  std::span<T> piece_of(std::byte* arena, std::size_t parameter) const {
    const Placement& placement = layout_.plan().placements[parameter];
    return elements_at<T>(arena, placement.offset, placement.bytes);
  }

  /// The gradient of a parameter where the model has just written it.
  template <class T>
  std::span<T> written(std::size_t parameter) const {
    if constexpr (Traits::frees_gradients)
      return piece_of<T>(ring_.arena_of(layout_.plan().placements[parameter].bucket), parameter);
    return piece_of<T>(pass_.adds ? second_->data() : arena_, parameter);
  }

  void start_complete_buckets() {
    if constexpr (Traits::reduces_early) {
      if (!pass_.synchronizes && !Traits::frees_gradients) return;
      const auto& plan = layout_.plan();
      for (; next_ != plan.bucket_count && readiness_.is_complete(next_); ++next_) {
        if (next_ >= most_under_way) wait(next_ - most_under_way);
        const Bucket& bucket = plan.bucket_table[next_];
        Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
          const auto travelling = travelling_gradients<T>(next_);
          if constexpr (!std::is_same_v<T, Travelling<T>>)
            execution_.cast(travelling, own_gradients<T>(next_));
          if constexpr (Traits::shards) {
            reductions_.start(next_, pieces<T>(travelling));
          } else {
            reductions_.start(comm_, next_, travelling);
          }
        });
      }
    }
  }

  /// All pieces of a bucket whose ranks own slices of it.
  template <class T>
  auto pieces(std::span<Travelling<T>> bucket) const {
    return reductions_.space().template pieces<T>(bucket.data(), bucket.size());
  }

  /// Every rank has reduced its slices: now it has all. **Ranks** all. **Host** blocks.
  void gather_averages() {
    for (const Bucket& bucket : layout_.plan().buckets()) {
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        reductions_.space().gather(pieces<T>(averages<T>(bucket.offset, bucket.bytes))).wait();
      });
    }
  }

  /// A bucket's gradients where the model has written them, and where they travel.
  template <class T>
  std::span<T> own_gradients(std::size_t b) const {
    const Bucket& bucket = layout_.plan().bucket_table[b];
    if constexpr (Traits::frees_gradients)
      return elements_at<T>(ring_.arena_of(b), bucket.offset, bucket.bytes);
    return own<T>(bucket.offset, bucket.bytes);
  }
  template <class T>
  std::span<Travelling<T>> travelling_gradients(std::size_t b) const {
    const Bucket& bucket = layout_.plan().bucket_table[b];
    if constexpr (Traits::frees_gradients) return ring_.template travelling<T>(b);
    return averages<T>(bucket.offset, bucket.bytes);
  }

  /// The same bucket by bucket, each of which gets its memory when the one before has travelled.
  void take_missing_as_zero_in_turn() {
    for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) {
      for (const std::size_t p : layout_.plan().members(b)) {
        if (readiness_.is_ready(p)) {
          used_[p] = 1;
          continue;
        }
        if (!ring_.holds(b)) claim(b, p);
        const Placement& placement = layout_.plan().placements[p];
        execution_.zero(ring_.arena_of(b) + placement.offset, placement.bytes);
        readiness_.mark(p);
      }
      start_complete_buckets();
    }
  }

  void take_missing_as_zero() {
    if constexpr (Traits::frees_gradients) return take_missing_as_zero_in_turn();
    for (std::size_t p = 0; p != used_.size(); ++p) {
      if constexpr (layout::freezes) {
        if (!layout_.plan().is_trained(p)) continue;
      }
      if (readiness_.is_ready(p)) {
        used_[p] = 1;
        continue;
      }
      const Placement& placement = layout_.plan().placements[p];
      if (!pass_.adds) execution_.zero(arena_ + placement.offset, placement.bytes);
      readiness_.mark(p);
    }
    start_complete_buckets();
  }

  std::byte* travelling_arena() {
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

  using Reductions = std::conditional_t<Traits::shards, ShardReductions<Traits, Comm>,
                                        BucketReductions<Traits, Comm>>;
  static Reductions make_reductions([[maybe_unused]] Comm& comm, std::size_t buckets) {
    if constexpr (Traits::shards) {
      return Reductions(comm, buckets);
    } else {
      return Reductions(buckets);
    }
  }
  static constexpr std::size_t most_under_way = [] {
    if constexpr (Traits::shards) {
      return most_shards_under_way<Comm>;
    } else if constexpr (Traits::reduces_early) {
      return std::size_t{Comm::most_under_way};
    } else {
      return std::size_t{0};
    }
  }();

  Comm& comm_;
  Execution& execution_;
  const layout& layout_;
  [[no_unique_address]] Ring ring_;
  std::byte* arena_;
  std::byte* averages_;
  [[no_unique_address]] Check check_;
  std::optional<typename Execution::Arena> second_;
  Readiness<layout> readiness_;
  Reductions reductions_;
  BackwardPass pass_;
  std::size_t next_ = 0;  // the bucket whose reduction is to start next
  double weight_ = 1;
  Usage used_;
};

/// A bare step whose `ready` tells the gradients. The parameter is a constant where its key is a
/// name, and so is its bucket where shapes are static.
template <class Model, class Bare, class Gradients>
class TrackedStep : public Bare {
 public:
  TrackedStep(const Bare& bare, Gradients& gradients) : Bare(bare), gradients_(&gradients) {}

  /// Says that a gradient is complete. With the last one of a bucket, its reduction starts.
  template <class Key>
  void ready(Key key) const {
    Bare::ready(key);  // refuses what has no gradient
    gradients_->ready(find_tensor<Model, TensorRole::parameter>(key));
  }

  /// Writes a gradient and says that it is complete.
  template <class Key, class Value = std::initializer_list<double>>
  void set_grad(Key key, const Value& value) const {
    this->write_grad(key, value);
    ready(key);
  }

 private:
  Gradients* gradients_;
};

}  // namespace lockstep::detail

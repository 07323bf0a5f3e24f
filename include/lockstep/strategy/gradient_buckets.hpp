// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A replica's gradients: written into buckets, summed over micro-batches, averaged over
/// ranks.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/checked.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/model/lookup.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/freed_gradients.hpp"
#include "lockstep/strategy/gradient_reduction.hpp"
#include "lockstep/strategy/joining_gradients.hpp"
#include "lockstep/strategy/parameter_gathers.hpp"
#include "lockstep/strategy/readiness.hpp"
#include "lockstep/strategy/reductions_of.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/subgraph_usage.hpp"
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
class GradientBuckets
    : public JoiningGradients<GradientBuckets<Traits, Comm, Execution>, Traits, Comm>,
      public FreedGradients<GradientBuckets<Traits, Comm, Execution>, Traits, Comm, Execution> {
  using Joining = JoiningGradients<GradientBuckets, Traits, Comm>;
  using Freed = FreedGradients<GradientBuckets, Traits, Comm, Execution>;
  friend Joining;
  friend Freed;
  using Freed::ring_;
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
      : Joining(comm),
        Freed(comm, where),
        comm_(comm),
        execution_(execution),
        layout_(where),
        arena_(make_arena()),
        averages_(travelling_arena()),
        check_(comm),
        readiness_(where),
        sets_(where),
        reductions_(comm, execution, where),
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

  /// The communicators of groups, where buckets are divided inside of these.
  void use(auto& groups) {
    if constexpr (Traits::scatters_buckets) reductions_.use(groups);
  }

  // A backward pass.

  /// Where sub-graphs are used and passes are captured, their use has been noted before.
  void begin_backward(BackwardPass pass) {
    if constexpr (Traits::has_subgraphs && !Traits::captures) sets_.note(used_);
    begin_pass<true>(pass);
  }
  /// `Live`: this rank has a batch.
  template <bool Live>
  void begin_pass(BackwardPass pass) {
    if constexpr (Traits::frees_gradients) {
      reduce();
      ring_.forget_holders();
    }
    pass_ = pass;
    next_ = 0;
    if constexpr (Traits::has_subgraphs) {
      if (!Traits::captures && pass.synchronizes) sets_.settle(comm_, used_);
      begin_subgraph();
    } else {
      readiness_.reset();
    }
    if constexpr (Traits::joins) {
      if (pass.synchronizes) this->board(Live);
    }
    if constexpr (is_checked && !Traits::frees_gradients) spoil();
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
    } else if constexpr (Traits::has_subgraphs && Traits::frees_gradients) {
      if (sets_.misses_some(readiness_)) refuse_missing();
      take_missing_as_zero();
    } else if (!readiness_.all_ready()) {
      refuse_missing();
    }
    // A graph of a micro-batch ends with all that it began.
    if constexpr (Traits::frees_gradients && Traits::captures) reduce();
  }

  // Sub-graphs.

  /// The set of the next pass, and what has been used since the last update.
  auto& subgraphs() { return sets_; }
  const auto& subgraphs() const { return sets_; }
  auto kept_usage() const { return std::pair(used_, sets_); }
  void set_usage(const auto& kept) { std::tie(used_, sets_) = kept; }
  /// The parameters of the next pass's set count as used. **Ranks** all, where they know each
  /// other's sets and the pass synchronizes.
  void note_subgraph(bool synchronizes) {
    sets_.note(used_);
    if (synchronizes) sets_.settle(comm_, used_);
  }

  /// A pass in which this rank has no samples: its gradients are zero, and it uses no parameter.
  void pass_without_samples(BackwardPass pass) {
    if constexpr (Traits::subgraphs_agree && !Traits::captures) sets_.note(used_);
    begin_pass<false>(pass);
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
    sets_.settle(comm_, used_);
    if constexpr (Traits::frees_gradients) return;  // every pass has reduced its own
    pass_.synchronizes = true;
    next_ = 0;
    if constexpr (Traits::joins) this->board(true);
    start_complete_buckets();
  }

  /// The gradients that were added up count `factor` times. No bucket is under way.
  void scale_own(double factor) {
    for (const Bucket& bucket : layout_.plan().buckets()) {
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        execution_.scale(own<T>(bucket.offset, bucket.bytes), factor);
      });
    }
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
    if constexpr (Traits::reduces) {
      if (!travels(b)) return;
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
                           reduction_of_gradients<how>(comm_.world_size().value()),
                           step_call<Traits>());
        }
      });
      if constexpr (Traits::joins) {
        if (b == 0) this->settle_if_boarded();
      }
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
    if constexpr (Traits::scatters_buckets) gather_averages();
    if constexpr (folds || Traits::divides_by_live) {
      double factor = this->factor();
      if constexpr (Traits::divides_by_live) {
        factor /= this->live_share();
        this->mark_as_averaged();
      }
      const auto& plan = layout_.plan();
      for (std::size_t b = 0; factor != 1 && b != plan.bucket_count; ++b) {
        const Bucket& bucket = plan.bucket_table[b];
        Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
          execution_.scale(averages<T>(bucket.offset, bucket.bytes), factor);
        });
      }
    }
  }

  /// The factor that makes averages of what `reduce` leaves.
  double factor() const { return folded_factor(how, comm_.world_size().value()); }

  /// **Host** blocks. Waits for the buckets under way first: a communicator that finishes them
  /// inside of another call no longer knows their types.
  const Usage& agree_on_usage() {
    if constexpr (!Traits::alone && !Traits::subgraphs_agree) {
      if constexpr (Traits::reduces_early) reduce();
      comm_.all_reduce(used_, Max{}, JobCall::step);
    }
    return used_;
  }

  /// Which parameters this rank has used since the last update.
  const Usage& used() const { return used_; }

  // After a step.

  /// No parameter has been used since the last update.
  void forget_usage() {
    if constexpr (Traits::notes_usage) std::ranges::fill(used_, std::uint8_t{0});
    sets_.forget();
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
    sets_.begin_anew();
    readiness_.reset();
    for (std::size_t p = 0; p != layout_.infos().size(); ++p) {
      if (layout_.plan().is_trained(p)) readiness_.mark(p);
    }
  }
  /// Has this rank used a parameter since the last update? Where nobody keeps count, it has.
  bool is_used([[maybe_unused]] std::size_t parameter) const {
    if constexpr (Traits::notes_usage) return used_[parameter] != 0;
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

  /// Where gradients travel through hooks: these have counts and states of their own.
  auto& hooked_reductions()
    requires(Traits::is_hooked)
  {
    return reductions_;
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

  using Check =
      std::conditional_t<is_checked, WrittenCheck<typename Traits::device>, NoWrittenCheck>;

  // The checked mode.

  void spoil() {
    if (pass_.adds) second_arena();
    for (std::size_t p = 0; p != layout_.infos().size(); ++p) {
      if (layout_.plan().is_trained(p) && !readiness_.is_ready(p)) spoil(p);
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
        if (!travels(next_)) continue;
        if (next_ >= most_under_way) wait(next_ - most_under_way);
        const Bucket& bucket = plan.bucket_table[next_];
        Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
          const std::size_t more = riders_behind<Traits>(next_, comm_.world_size());
          const auto travelling = travelling_gradients<T>(next_, more);
          if constexpr (!std::is_same_v<T, Travelling<T>>)
            execution_.cast(travelling, own_gradients<T>(next_, more));
          if constexpr (Traits::scatters_buckets) {
            reductions_.template start<T>(next_, travelling);
          } else {
            reductions_.start(comm_, next_, travelling);
          }
        });
      }
    }
  }

  /// Every rank has reduced its slices: now it has all. **Ranks** all. **Host** blocks.
  void gather_averages() {
    for (std::size_t b = Traits::joins ? 1 : 0; b != layout_.plan().bucket_count; ++b) {
      const Bucket& bucket = layout_.plan().bucket_table[b];
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        const auto& space = reductions_.space();
        const auto whole = averages<T>(bucket.offset, bucket.bytes);
        space.gather(space.template pieces<T>(whole.data(), whole.size())).wait();
      });
    }
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

  void take_missing_as_zero() {
    if constexpr (Traits::frees_gradients) return this->take_missing_as_zero_in_turn();
    for (std::size_t p = 0; p != used_.size(); ++p) {
      if constexpr (layout::freezes) {
        if (!layout_.plan().is_trained(p)) continue;
      }
      if (readiness_.is_ready(p)) {
        if constexpr (Traits::skips_unused) used_[p] = 1;
        continue;
      }
      const Placement& placement = layout_.plan().placements[p];
      if (!pass_.adds) execution_.zero(arena_ + placement.offset, placement.bytes);
      readiness_.mark(p);
    }
    start_complete_buckets();
  }

  /// Gradients outside of the set are zero, unless earlier micro-batches have brought some.
  void begin_subgraph() {
    const auto& table = sets_.table();
    if constexpr (Traits::frees_gradients) {  // memory comes bucket by bucket: zeros come last
      readiness_.reset();
      return;
    }
    readiness_.reset(table);
    for (std::size_t i = 0; !pass_.adds && i != table.unused_pieces; ++i)
      execution_.zero(arena_ + table.unused[i].offset, table.unused[i].bytes);
  }

  /// Is a bucket reduced? All are, unless every rank knows that no rank has used a member.
  bool travels([[maybe_unused]] std::size_t bucket) const {
    if constexpr (Traits::subgraphs_agree && !Traits::frees_gradients) {
      for (const std::size_t p : layout_.plan().members(bucket)) {
        if (used_[p] != 0) return true;
      }
      return false;
    } else {
      return true;
    }
  }

  [[noreturn, gnu::cold, gnu::noinline]] void refuse_missing() const {
    if constexpr (Traits::has_subgraphs) {
      sets_.refuse_missing(layout_, readiness_);
    } else {
      throw Error("backward", "no gradient came for " + readiness_.missing_names(),
                  "let backward write and mark every parameter, or add UnusedParameters<Zero>");
    }
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
  std::byte* arena_;
  std::byte* averages_;
  [[no_unique_address]] Check check_;
  std::optional<typename Execution::Arena> second_;
  Readiness<layout> readiness_;
  [[no_unique_address]] SubgraphUsageOf<Traits> sets_;
  ReductionsOf<Traits, Comm, Execution> reductions_;
  BackwardPass pass_;
  std::size_t next_ = 0;  // the bucket whose reduction is to start next
  double weight_ = 1;
  Usage used_;
};

}  // namespace lockstep::detail

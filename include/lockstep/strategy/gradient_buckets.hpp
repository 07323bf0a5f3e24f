// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A replica's gradients: written into buckets, summed over micro-batches, averaged over
/// ranks.

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/checked.hpp"
#include "lockstep/model/lookup.hpp"
#include "lockstep/strategy/checked_gradients.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/freed_gradients.hpp"
#include "lockstep/strategy/gradient_memory.hpp"
#include "lockstep/strategy/gradient_reduction.hpp"
#include "lockstep/strategy/joining_gradients.hpp"
#include "lockstep/strategy/parameter_gathers.hpp"
#include "lockstep/strategy/readiness.hpp"
#include "lockstep/strategy/reductions_of.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/riders.hpp"
#include "lockstep/strategy/used_parameters.hpp"

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
      public GradientMemory<Traits, Comm, Execution>,
      public FreedGradients<GradientBuckets<Traits, Comm, Execution>, Traits>,
      public CheckedGradients<GradientBuckets<Traits, Comm, Execution>, Traits, Comm>,
      public UsedParameters<GradientBuckets<Traits, Comm, Execution>, Traits> {
  using Joining = JoiningGradients<GradientBuckets, Traits, Comm>;
  using Memory = GradientMemory<Traits, Comm, Execution>;
  using Freed = FreedGradients<GradientBuckets, Traits>;
  using Checked = CheckedGradients<GradientBuckets, Traits, Comm>;
  using Used = UsedParameters<GradientBuckets, Traits>;
  friend Joining;
  friend Freed;
  friend Checked;
  friend Used;
  using layout = typename Traits::layout;
  template <class T>
  using Travelling = typename Traits::template travelling<T>;

 public:
  /// How gradients are reduced, and whether a factor is left to those that read the result.
  static constexpr GradientReduction how = gradient_reduction<Traits, Comm>();
  static constexpr bool frees = Traits::frees_gradients;
  static constexpr bool skips_unused = Traits::skips_unused;
  static constexpr bool folds =
      how == GradientReduction::folded_sum || how == GradientReduction::folded_sum_of_halves;

  GradientBuckets(Comm& comm, Execution& execution, const layout& where)
      : Joining(comm),
        Memory(comm, execution, where),
        Checked(comm),
        Used(where),
        readiness_(where),
        reductions_(comm, execution, where) {
    static_assert(GradientSource<GradientBuckets>);
    this->foresee();
  }

  /// The communicators of groups, where buckets are divided inside of these.
  void use(auto& groups) {
    if constexpr (Traits::scatters_buckets) reductions_.use(groups);
  }

  // A backward pass.

  /// Where sub-graphs are used and passes are captured, their use has been noted before.
  void begin_backward(BackwardPass pass) {
    if constexpr (Traits::has_subgraphs && !Traits::captures) this->sets_.note(this->used_);
    begin_pass<true>(pass);
  }
  /// `Live`: this rank has a batch.
  template <bool Live>
  void begin_pass(BackwardPass pass) {
    if constexpr (Traits::frees_gradients) {
      reduce();
      this->ring_.forget_holders();
    }
    pass_ = pass;
    next_ = 0;
    if constexpr (Traits::has_subgraphs) {
      this->begin_subgraph();
    } else {
      readiness_.reset();
    }
    if constexpr (Traits::joins) {
      if (pass.synchronizes) this->board(Live);
    }
    if constexpr (is_checked && !Traits::frees_gradients) this->spoil();
  }

  /// The gradient of a parameter is complete.
  template <class Tensor>
  void ready(Tensor tensor) {
    readiness_.mark(tensor.index);
    if constexpr (Traits::skips_unused) this->used_[tensor.index] = 1;
    with_element_of(tensor, [&]<class T>(std::type_identity<T>) {
      if constexpr (is_checked) this->template inspect<T>(tensor.index);
      if constexpr (Traits::weighs_shares) {
        if (weight_ != 1)
          this->execution_.scale(this->template written<T>(tensor.index, pass_.adds), weight_);
      }
      if constexpr (!Traits::frees_gradients) {
        if (pass_.adds)
          this->execution_.add(
              this->template piece_of<T>(this->arena_, tensor.index),
              std::span<const T>(this->template written<T>(tensor.index, pass_.adds)));
      }
    });
    start_complete_buckets();
  }

  /// A parameter has no gradient in this pass: it counts as zero. Where buckets are given their
  /// memory one after the other, `end_backward` says so of all.
  void unused(std::size_t parameter)
    requires(Traits::skips_unused)
  {
    if constexpr (!Traits::frees_gradients) {
      take_as_zero(parameter);
      start_complete_buckets();
    }
  }

  void end_backward() {
    if constexpr (is_checked) this->require_written();
    if constexpr (Traits::skips_unused) {
      take_missing_as_zero();
    } else if constexpr (Traits::has_subgraphs && Traits::frees_gradients) {
      if (this->sets_.misses_some(readiness_)) this->refuse_missing();
      take_missing_as_zero();
    } else if (!readiness_.all_ready()) {
      this->refuse_missing();
    }
    // A graph of a micro-batch ends with all that it began.
    if constexpr (Traits::frees_gradients && Traits::captures) reduce();
  }

  /// A pass in which this rank has no samples: its gradients are zero, and it uses no parameter.
  void pass_without_samples(BackwardPass pass) {
    if constexpr (Traits::subgraphs_agree && !Traits::captures) this->sets_.note(this->used_);
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
    if constexpr (Traits::frees_gradients) return;  // every pass has reduced its own
    pass_.synchronizes = true;
    next_ = 0;
    if constexpr (Traits::joins) this->board(true);
    start_complete_buckets();
  }

  // For updaters: see GradientSource.

  /// **Host** blocks.
  void wait(std::size_t b) {
    if constexpr (Traits::reduces) {
      if (!this->travels(b)) return;
      const Bucket& bucket = this->layout_.plan().bucket_table[b];
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        if constexpr (Traits::frees_gradients) {
          if (!reductions_.template is_under_way<Travelling<T>>(b)) return;
          reductions_.template wait<Travelling<T>>(b);
          this->ring_.template keep<T>(this->execution_, b, pass_.adds);
        } else if constexpr (Traits::reduces_early) {
          reductions_.template wait<Travelling<T>>(b);
        } else {
          this->comm_.all_reduce(this->template own<T>(bucket.offset, bucket.bytes),
                                 reduction_of_gradients<how>(this->comm_.world_size().value()),
                                 step_call<Traits, JobCall::backward>());
        }
      });
      if constexpr (Traits::joins) {
        if (b == 0) this->settle_if_boarded();
      }
    }
  }

  /// **Host** blocks.
  void reduce() {
    for (std::size_t b = 0; b != this->layout_.plan().bucket_count; ++b) wait(b);
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
      const auto& plan = this->layout_.plan();
      for (std::size_t b = 0; factor != 1 && b != plan.bucket_count; ++b) {
        const Bucket& bucket = plan.bucket_table[b];
        Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
          this->execution_.scale(this->template averages<T>(bucket.offset, bucket.bytes), factor);
        });
      }
    }
  }

  /// The factor that makes averages of what `reduce` leaves.
  double factor() const { return folded_factor(how, this->comm_.world_size().value()); }

  // After a step.

  /// Drops the handles of all reductions: they belong to a failed capture and will never run.
  void forget_reductions() { reductions_.forget(); }

  /// Where gradients travel through hooks: these have counts and states of their own.
  auto& hooked_reductions()
    requires(Traits::is_hooked)
  {
    return reductions_;
  }

 private:
  /// Calls `f` with the type of a parameter's elements, which is a constant for declared ones.
  template <class Tensor, class F>
  void with_element_of(Tensor tensor, const F& f) const {
    if constexpr (std::is_same_v<Tensor, ListedTensor>) {
      Traits::with_element(this->layout_.infos()[tensor.index].element, f);
    } else {
      f(std::type_identity<ElementOf<Traits::parameter_types::of(Tensor::info.element)>>{});
    }
  }

  void start_complete_buckets() {
    if constexpr (Traits::reduces_early) {
      if (!pass_.synchronizes && !Traits::frees_gradients) return;
      const auto& plan = this->layout_.plan();
      for (; next_ != plan.bucket_count && readiness_.is_complete(next_); ++next_) {
        if (!this->travels(next_)) continue;
        if (next_ >= most_under_way) wait(next_ - most_under_way);
        const Bucket& bucket = plan.bucket_table[next_];
        Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
          const std::size_t more = riders_behind<Traits>(next_, this->comm_.world_size());
          const auto travelling = this->template travelling_gradients<T>(next_, more);
          if constexpr (!std::is_same_v<T, Travelling<T>>)
            this->execution_.cast(travelling, this->template own_gradients<T>(next_, more));
          if constexpr (Traits::scatters_buckets) {
            reductions_.template start<T>(next_, travelling);
          } else {
            reductions_.start(this->comm_, next_, travelling);
          }
        });
      }
    }
  }

  /// Every rank has reduced its slices: now it has all. **Ranks** all. **Host** blocks.
  void gather_averages() {
    for (std::size_t b = Traits::joins ? 1 : 0; b != this->layout_.plan().bucket_count; ++b) {
      const Bucket& bucket = this->layout_.plan().bucket_table[b];
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        const auto& space = reductions_.space();
        const auto whole = this->template averages<T>(bucket.offset, bucket.bytes);
        space.gather(space.template pieces<T>(whole.data(), whole.size())).wait();
      });
    }
  }

  void take_missing_as_zero() {
    if constexpr (Traits::frees_gradients) return this->take_missing_as_zero_in_turn();
    for (std::size_t p = 0; p != this->used_.size(); ++p) {
      if constexpr (layout::freezes) {
        if (!this->layout_.plan().is_trained(p)) continue;
      }
      if (!readiness_.is_ready(p)) take_as_zero(p);
    }
    start_complete_buckets();
  }
  void take_as_zero(std::size_t p) {
    readiness_.mark(p);
    const Placement& placement = this->layout_.plan().placements[p];
    if (!pass_.adds) this->execution_.zero(this->arena_ + placement.offset, placement.bytes);
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

  Readiness<layout> readiness_;
  ReductionsOf<Traits, Comm, Execution> reductions_;
  BackwardPass pass_;
  std::size_t next_ = 0;  // the bucket whose reduction is to start next
  double weight_ = 1;
};

}  // namespace lockstep::detail

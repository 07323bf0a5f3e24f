// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A replica's gradients: written into buckets, summed over micro-batches, averaged over
/// ranks.

#include "lockstep/bucket/layout.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/model/tensor_list.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/feature/checked_gradients.hpp"
#include "lockstep/strategy/feature/join.hpp"
#include "lockstep/strategy/feature/random.hpp"
#include "lockstep/strategy/feature/sync_norms.hpp"
#include "lockstep/strategy/feature/unused_parameters.hpp"
#include "lockstep/strategy/features.hpp"
#include "lockstep/strategy/reduction.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/sharding/sharding.hpp"
#include "lockstep/strategy/sharding/zero.hpp"

namespace lockstep::detail {

/// Which gradients of a backward pass have arrived, and which buckets they complete. The layout
/// must outlive it.
template <class Layout>
class Readiness {
 public:
  explicit Readiness(const Layout& layout)
      : layout_(layout),
        ready_(make_kept_table<std::uint8_t, Layout::count>(layout.infos().size())),
        missing_(make_kept_table<std::size_t, Layout::count>(layout.plan().bucket_count)) {}

  /// A backward pass begins: no gradient has arrived.
  void reset() {
    const auto& plan = layout_.plan();
    for (std::uint8_t& ready : ready_) ready = 0;
    for (std::size_t b = 0; b != plan.bucket_count; ++b)
      missing_[b] = plan.bucket_table[b].parameters;
    all_missing_ = plan.trained;
  }

  /// One of a sub-graph begins: nothing is expected of parameters that it does not use.
  template <class Table>
  void reset(const Table& table) {
    for (std::size_t p = 0; p != ready_.size(); ++p) ready_[p] = table.contains(p) ? 0 : 1;
    for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) missing_[b] = table.members[b];
    all_missing_ = table.parameters;
  }

  /// Marks a gradient as arrived; it must be the first time in this pass.
  void mark(std::size_t parameter) {
    if (parameter >= ready_.size() || ready_[parameter] != 0) [[unlikely]]
      refuse(parameter);
    ready_[parameter] = 1;
    --missing_[layout_.plan().placements[parameter].bucket];
    --all_missing_;
  }

  bool is_ready(std::size_t parameter) const { return ready_[parameter] != 0; }
  bool is_complete(std::size_t bucket) const { return missing_[bucket] == 0; }
  bool all_ready() const { return all_missing_ == 0; }

  /// The names of parameters whose gradients have not arrived, at most eight, of those for which
  /// `among(parameter)` says yes.
  std::string missing_names(const auto& among) const {
    constexpr std::size_t most = 8;
    std::string names;
    std::size_t missing = 0;
    for (std::size_t p = 0; p < ready_.size(); ++p) {
      if (is_ready(p) || !layout_.plan().is_trained(p) || !among(p)) continue;
      if (missing++ < most) names.append(missing == 1 ? "" : ", ").append(layout_.name(p));
    }
    if (missing > most) names += text({" and ", missing - most, " more"});
    return names;
  }

 private:
  [[noreturn, gnu::noinline]] void refuse(std::size_t parameter) const {
    if (parameter >= ready_.size()) {
      fail("backward", {"parameter ", parameter, " of ", ready_.size(), " was marked ready"},
           "number parameters from 0, in the order in which the model lists them");
    }
    fail("backward", {"the gradient of ", layout_.name(parameter), " was marked ready twice"},
         "call step.ready once for each parameter, when its gradient is complete");
  }

  const Layout& layout_;
  KeptTable<std::uint8_t, Layout::count> ready_;   // by parameter
  KeptTable<std::size_t, Layout::count> missing_;  // gradients, by bucket
  std::size_t all_missing_ = 0;
};

/// Are gradients of a micro-batch reduced over ranks, or kept until those of a later one are?
enum class Sync : std::uint8_t { no, yes };

/// How a backward pass treats its gradients.
struct BackwardPass {
  bool synchronizes = false;  ///< buckets are reduced over ranks as they complete
  bool adds = false;          ///< gradients are added to those of earlier micro-batches
};

/// The features that apply to a job. A new feature is its file and its line here. The order is the
/// order at every stage: sub-graphs say which gradients come, before the checked mode looks for
/// them.
template <class Traits, class Comm>
using FeaturesOf = typename SelectFeatures<Traits, Comm, FeatureSet<>,                        //
                                           If<Traits::has_subgraphs, SubgraphUsage>,          //
                                           If<Traits::skips_unused, UnusedParametersAsZero>,  //
                                           If<Traits::joins, JoiningRanks>,                   //
                                           If<is_checked, CheckedGradients>,                  //
                                           If<Traits::draws, RandomNumbers>,                  //
                                           If<Traits::knows_norm_ranks, SyncNorms>>::type;

/// The gradients of backward passes. The model writes gradients and marks each as ready; in a pass
/// that synchronizes, a bucket's reduction starts with its last gradient, buckets strictly in
/// order. What features do meanwhile is in `features()`.
///
/// Gradients lie in arenas that are laid out as the plan says: one for gradients, a second one for
/// those of a pass that adds, and another where they travel in another type. Each gradient of a
/// pass that adds is added to the first arena while it is still in the cache: models only ever
/// overwrite, and nothing is ever zeroed. A rank that gives gradients away has a ring of buckets
/// instead, whose slices are added when the buckets have landed.
template <class Traits, class Comm, class Execution>
class GradientBuckets {
  using layout_type = typename Traits::layout;
  template <class T>
  using Travelling = typename Traits::template travelling<T>;

 public:
  using Features = FeaturesOf<Traits, Comm>;
  /// How gradients are reduced, and whether a factor is left to those that read the result.
  static constexpr GradientReduction how = gradient_reduction<Traits, Comm>();
  static constexpr bool frees = Traits::frees_gradients;
  static constexpr bool skips_unused = Traits::skips_unused;
  static constexpr bool folds =
      how == GradientReduction::folded_sum || how == GradientReduction::folded_sum_of_halves;

  /// `groups` are the communicators of groups, where buckets are divided inside of these.
  GradientBuckets(Comm& comm, Execution& execution, const layout_type& where,
                  JobGroupsOf<Traits, Comm>* groups = nullptr)
      : comm_(comm),
        execution_(execution),
        layout_(where),
        ring_(comm, where),
        arena_(make_arena()),
        averages_(make_travelling_arena()),
        readiness_(where),
        features_(*this),
        reductions_(comm, where, groups) {
    foresee();
  }
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  // What features share.

  Features& features() { return features_; }
  const Features& features() const { return features_; }
  Comm& comm() { return comm_; }
  Execution& execution() { return execution_; }
  const layout_type& layout() const { return layout_; }
  Readiness<layout_type>& readiness() { return readiness_; }
  const Readiness<layout_type>& readiness() const { return readiness_; }
  const BackwardPass& pass() const { return pass_; }

  /// Where a model writes the gradients of a pass that adds nothing.
  std::byte* arena() const { return arena_; }
  /// Where a model writes the gradients of a pass that adds. Allocated at the first call.
  std::byte* second_arena() {
    if (!second_) second_.emplace(layout_.plan().bytes);
    return second_->data();
  }
  /// This rank's gradients in a piece of the arena, summed over micro-batches. Buckets whose
  /// reductions are under way must not be touched.
  template <class T>
  std::span<T> own(std::size_t offset, std::size_t bytes) const {
    return elements_at<T>(arena_, offset, bytes);
  }
  /// The gradient of a parameter where the model has just written it.
  template <class T>
  std::span<T> written(std::size_t parameter) const {
    if constexpr (Traits::frees_gradients)
      return piece_of<T>(ring_.arena_of(layout_.plan().placements[parameter].bucket), parameter);
    return piece_of<T>(pass_.adds ? second_->data() : arena_, parameter);
  }
  /// Averages lie where the gradients are, unless they are reduced in another type.
  template <class T>
  std::span<Travelling<T>> averages(std::size_t offset, std::size_t bytes) const {
    return elements_at<Travelling<T>>(averages_, offset / sizeof(T) * sizeof(Travelling<T>),
                                      bytes / sizeof(T) * sizeof(Travelling<T>));
  }
  /// This rank's averages of its slice of a bucket, where it keeps no others.
  template <class T>
  std::span<Travelling<T>> slice_averages(std::size_t b) const {
    return ring_.template slice<T>(b);
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
  /// The bytes of the gradients that this rank keeps.
  std::size_t bytes() const {
    if constexpr (Traits::frees_gradients) {
      return ring_.bytes();
    } else {
      return layout_.plan().bytes * (second_ ? 2 : 1);
    }
  }

  // A backward pass.

  /// `live`: this rank has samples.
  void begin_backward(BackwardPass pass, bool live = true) {
    if constexpr (Traits::frees_gradients) {
      reduce();
      ring_.forget_holders();
    }
    pass_ = pass;
    next_ = 0;
    readiness_.reset();
    features_.before_backward(*this, live);
    if (pass.synchronizes) features_.before_reductions(*this, live);
  }

  /// The gradient of a parameter is complete.
  template <class Tensor>
  void ready(Tensor tensor) {
    readiness_.mark(tensor.index);
    if constexpr (std::is_same_v<Tensor, ListedTensor>) {
      Traits::with_element(layout_.infos()[tensor.index].element,
                           [&]<class T>(std::type_identity<T>) { take<T>(tensor.index); });
    } else {
      take<ElementOf<Traits::parameter_types::of(Tensor::info.element)>>(tensor.index);
    }
    start_complete_buckets();
  }

  /// The gradients of later passes count `weight` times. Weights have a mean of 1 over ranks.
  void weigh(double weight) { weight_ = weight; }

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
    features_.after_backward(*this);
    if (!readiness_.all_ready()) refuse_missing();
    // A graph of a micro-batch ends with all that it began.
    if constexpr (Traits::frees_gradients && Traits::captures) reduce();
  }

  /// A pass in which this rank has no samples: its gradients are zero, and it uses no parameter.
  void pass_without_samples(BackwardPass pass) {
    begin_backward(pass, false);
    take_missing_as_zero();
  }

  /// Gradients that have not come count as zero. Where memory is handed out bucket by bucket, each
  /// gets its own when the one before has travelled.
  void take_missing_as_zero() {
    for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) {
      for (const std::size_t p : layout_.plan().members(b)) {
        if (!readiness_.is_ready(p)) take_as_zero(p);
      }
      start_complete_buckets();
    }
  }

  /// The gradients that were added up count `factor` times. No bucket is under way.
  void scale_own(double factor) {
    for (const Bucket& bucket : layout_.plan().buckets()) {
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        execution_.scale(own<T>(bucket.offset, bucket.bytes), factor);
      });
    }
  }

  /// Starts the reductions of gradients whose passes did not synchronize.
  void start_late() {
    if constexpr (Traits::frees_gradients) return;  // every pass has reduced its own
    pass_.synchronizes = true;
    next_ = 0;
    features_.before_reductions(*this, true);
    start_complete_buckets();
  }

  // For updaters, which take what they need: whole averages need not exist, and never do where
  // every rank reduces only the slice that it updates.

  /// Averages a bucket over ranks, or waits for its reduction that is under way. **Ranks** all, in
  /// the order of buckets. **Host** blocks.
  void wait(std::size_t b) {
    if constexpr (Traits::reduces) {
      if (!features_.needs_bucket(*this, b)) return;
      const Bucket& bucket = layout_.plan().bucket_table[b];
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        if constexpr (Traits::frees_gradients) {
          if (!reductions_.template is_under_way<T>(b)) return;
          reductions_.template wait<T>(b);
          ring_.template keep<T>(execution_, b, pass_.adds);
        } else if constexpr (Traits::reduces_early) {
          reductions_.template wait<T>(b);
        } else {
          comm_.all_reduce(own<T>(bucket.offset, bucket.bytes),
                           reduction_of_gradients<how>(comm_.world_size().value()),
                           step_call<Traits, JobCall::backward>());
        }
      });
      features_.bucket_reduced(*this, b);
    }
  }

  /// The same for all buckets.
  void reduce() {
    for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) wait(b);
  }

  /// Reduces, and makes the results averages where a factor was left to those that read them: the
  /// program may look at them now. **Host** blocks.
  void average() {
    reduce();
    if constexpr (Traits::scatters_buckets) gather_averages();
    if constexpr (folds || Features::divides_averages) {
      const double factor = this->factor() / features_.divisor(*this);
      for (std::size_t b = 0; factor != 1 && b != layout_.plan().bucket_count; ++b) {
        const Bucket& bucket = layout_.plan().bucket_table[b];
        Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
          execution_.scale(averages<T>(bucket.offset, bucket.bytes), factor);
        });
      }
    }
  }

  /// The factor that makes averages of what `reduce` leaves.
  double factor() const { return folded_factor(how, comm_.world_size().value()); }

  auto& reductions() { return reductions_; }

 private:
  /// The model has written a gradient: it is weighed where ranks have shares of different sizes,
  /// and added to those of earlier micro-batches.
  template <class T>
  void take(std::size_t parameter) {
    features_.template gradient_ready<T>(*this, parameter);
    if constexpr (Traits::weighs_shares) {
      if (weight_ != 1) execution_.scale(written<T>(parameter), weight_);
    }
    if constexpr (!Traits::frees_gradients) {
      if (pass_.adds)
        execution_.add(piece_of<T>(arena_, parameter), std::span<const T>(written<T>(parameter)));
    }
  }

  void start_complete_buckets() {
    if constexpr (Traits::reduces_early) {
      if (!pass_.synchronizes && !Traits::frees_gradients) return;
      const auto& plan = layout_.plan();
      for (; next_ != plan.bucket_count && readiness_.is_complete(next_); ++next_) {
        if (!features_.needs_bucket(*this, next_)) continue;
        if (next_ >= most_under_way) wait(next_ - most_under_way);
        Traits::with_element(plan.bucket_table[next_].element,
                             [&]<class T>(std::type_identity<T>) { start<T>(next_); });
      }
    }
  }
  /// Starts to reduce a bucket, with the join flags behind it.
  template <class T>
  void start(std::size_t b) {
    const std::size_t more = flags_behind<Traits>(b, comm_.world_size());
    const auto travelling = travelling_gradients<T>(b, more);
    if constexpr (!std::is_same_v<T, Travelling<T>>)
      execution_.cast(travelling, own_gradients<T>(b, more));
    reductions_.template start<T>(b, travelling);
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

  void take_as_zero(std::size_t p) {
    const Placement& placement = layout_.plan().placements[p];
    if constexpr (Traits::frees_gradients) {
      if (!ring_.holds(placement.bucket)) claim(placement.bucket, p);
      execution_.zero(ring_.arena_of(placement.bucket) + placement.offset, placement.bytes);
    } else if (!pass_.adds) {
      execution_.zero(arena_ + placement.offset, placement.bytes);
    }
    readiness_.mark(p);
  }

  [[noreturn, gnu::cold, gnu::noinline]] void refuse_missing() const {
    const auto all = [](std::size_t) { return true; };
    throw Error("backward", "no gradient came for " + readiness_.missing_names(all),
                "let backward write and mark every parameter, or add UnusedParameters<Zero>");
  }

  // Memory.

  /// Gives a bucket its memory, which an earlier one may have: that one has travelled first.
  [[gnu::noinline]] void claim(std::size_t b, std::size_t parameter) {
    const std::size_t earlier = ring_.holder(b);
    if (b >= next_ + ring_.slots())
      refuse_gradient(parameter, " was asked for before those of later layers were complete");
    if (earlier != no_bucket) {
      if (earlier > b) refuse_gradient(parameter, " was asked for when its bucket had been sent");
      for (std::size_t k = 0; k <= earlier; ++k) wait(k);  // in the same order on all ranks
    }
    ring_.take(b);
    ring_.clear_padding(execution_, b);
    features_.bucket_claimed(*this, b);
  }
  [[noreturn, gnu::cold, gnu::noinline]] void refuse_gradient(std::size_t parameter,
                                                              std::string_view when) const {
    fail("backward", {"the gradient of ", layout_.name(parameter), when},
         "write gradients last layer first, and ask for each when it is written; "
         "Sharding<ZeroRedundancy, Gradients> keeps few at a time");
  }

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
  /// Takes all memory now that steps will need: to allocate later may wait for other ranks' GPUs.
  void foresee() {
    if constexpr (Traits::micro_batches > 1 && !Traits::frees_gradients) second_arena();
    if constexpr (requires { comm_.reserve(std::size_t{1}); }) {
      std::size_t most = 0;
      for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) {
        const Bucket& bucket = layout_.plan().bucket_table[b];
        const std::size_t count = bucket.count() + flags_behind<Traits>(b, comm_.world_size());
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

  static constexpr std::size_t most_under_way = [] {
    if constexpr (Traits::shards) {
      return most_shards_under_way<Comm>;
    } else if constexpr (Traits::reduces_early) {
      return std::size_t{Comm::most_under_way};
    } else {
      return std::size_t{0};
    }
  }();

  /// What stands in for a ring where gradients stay whole.
  struct NoRing {
    constexpr NoRing(Comm&, const layout_type&) {}
  };
  using Ring =
      std::conditional_t<Traits::frees_gradients, GradientRing<Traits, Comm, Execution>, NoRing>;

  Comm& comm_;
  Execution& execution_;
  const layout_type& layout_;
  [[no_unique_address]] Ring ring_;
  std::byte* arena_;
  std::byte* averages_;
  std::optional<typename Execution::Arena> second_;
  Readiness<layout_type> readiness_;
  [[no_unique_address]] Features features_;
  ReductionsOf<Traits, Comm> reductions_;
  BackwardPass pass_;
  double weight_ = 1;     // of this rank's gradients
  std::size_t next_ = 0;  // the bucket whose reduction is to start next
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A replica's gradients: written to buckets, summed over micro-batches, averaged over ranks.

#include "lockstep/detail/strategy/feature/checked_gradients.hpp"
#include "lockstep/detail/strategy/feature/random.hpp"
#include "lockstep/detail/strategy/feature/sync_norms.hpp"
#include "lockstep/detail/strategy/feature/unused_parameters.hpp"
#include "lockstep/detail/strategy/sharding/zero.hpp"

namespace lockstep::detail {

/// Tracks which gradients of a backward pass have arrived, and which buckets are complete.
template <class Layout>
class Readiness {
 public:
  explicit Readiness(const Layout& layout)
      : layout_(layout),
        ready_(make_small_table<std::uint8_t, Layout::count>(layout.infos().size())),
        missing_(make_small_table<std::size_t, Layout::count>(layout.plan().bucket_count)) {}

  void reset() {
    const auto& plan = layout_.plan();
    for (std::uint8_t& ready : ready_) ready = 0;
    for (std::size_t b = 0; b != plan.bucket_count; ++b)
      missing_[b] = plan.bucket_table[b].parameters;
    all_missing_ = plan.trained;
  }

  /// The same for a sub-graph: only gradients of its parameters are expected.
  void reset(const auto& table) {
    for (std::size_t p = 0; p != ready_.size(); ++p) ready_[p] = table.contains(p) ? 0 : 1;
    for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) missing_[b] = table.members[b];
    all_missing_ = table.parameters;
  }

  /// Marks a gradient as arrived, or throws if it has arrived in this pass already.
  void mark(std::size_t parameter) {
    if (parameter >= ready_.size() || ready_[parameter] != 0) [[unlikely]]
      reject(parameter);
    ready_[parameter] = 1;
    --missing_[layout_.plan().placements[parameter].bucket];
    --all_missing_;
  }

  bool is_ready(std::size_t parameter) const { return ready_[parameter] != 0; }
  bool is_complete(std::size_t bucket) const { return missing_[bucket] == 0; }
  bool all_ready() const { return all_missing_ == 0; }

  /// The names of at most eight parameters with `among(parameter)` whose gradients are missing.
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
  [[noreturn, gnu::noinline]] void reject(std::size_t parameter) const {
    if (parameter >= ready_.size()) {
      fail("backward", {"parameter ", parameter, " of ", ready_.size(), " was marked ready"},
           "number parameters from 0, in the order in which the model lists them");
    }
    fail("backward", {"the gradient of ", layout_.name(parameter), " was marked ready twice"},
         "call step.ready once for each parameter, when its gradient is complete");
  }

  const Layout& layout_;
  SmallTable<std::uint8_t, Layout::count> ready_;   // by parameter
  SmallTable<std::size_t, Layout::count> missing_;  // gradients, by bucket
  std::size_t all_missing_ = 0;
};

/// Are the gradients of a micro-batch reduced over ranks, or kept until those of a later one are?
enum class Sync : std::uint8_t { no, yes };

/// The job's features, in the order of every stage: a new one is its file and a line here.
template <class Traits, class Comm>
using FeaturesOf =
    typename decltype(If<Traits::has_subgraphs, SubgraphUsage<Traits, Comm>>{} +
                      If<Traits::skips_unused, UnusedParametersAsZero<Traits, Comm>>{} +
                      If<Traits::joins, JoiningRanks<Traits, Comm>>{} +
                      If<is_checked, CheckedGradients<Traits, Comm>>{} +
                      If<Traits::draws, RandomNumbers<Traits, Comm>>{} +
                      If<Traits::knows_norm_ranks, SyncNorms<Traits, Comm>>{})::type;

/// The gradients of backward passes. The model writes gradients and marks each as ready; in a pass
/// that synchronizes, a bucket's reduction starts with its last gradient, strictly in bucket order.
///
/// Gradients lie in arenas with the plan's layout: one for sums, a second for passes that add, and
/// another where they are reduced in another type. Models only overwrite: a gradient of a pass that
/// adds is added to the first arena while it is in the cache, and no arena is zeroed first. A rank
/// that frees gradients has a ring of buckets instead, and adds the slices of reduced buckets.
template <class Traits, class Comm, class Execution>
class GradientBuckets {
  using layout_type = typename Traits::layout;
  template <class T>
  using ReduceType = typename Traits::template reduce_type<T>;

 public:
  using Features = FeaturesOf<Traits, Comm>;
  static constexpr GradientReduction how = gradient_reduction<Traits, Comm>();
  static constexpr bool frees = Traits::frees_gradients;
  static constexpr bool gathers = Traits::gathers_parameters;
  /// Ranks that use different parameters complete buckets at different times of backward, but must
  /// gather units and reduce buckets in one order: they reduce when backward is over.
  static constexpr bool reduces_late = gathers && Traits::notes_usage;
  static constexpr bool skips_unused = Traits::skips_unused;
  static constexpr bool folds =
      how == GradientReduction::folded_sum || how == GradientReduction::folded_sum_of_halves;

  GradientBuckets(Comm& comm, Execution& execution, const layout_type& where,
                  JobGroupsOf<Traits, Comm>* groups = nullptr)
      : comm_(comm),
        execution_(execution),
        layout_(where),
        ring_(comm, where),
        arena_(make_arena()),
        averages_(make_reduce_arena()),
        readiness_(where),
        features_(*this),
        reductions_(comm, where, groups) {
    foresee();
  }
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  // Shared by features.

  Features& features() { return features_; }
  const Features& features() const { return features_; }
  Comm& comm() { return comm_; }
  Execution& execution() { return execution_; }
  const layout_type& layout() const { return layout_; }
  Readiness<layout_type>& readiness() { return readiness_; }
  const Readiness<layout_type>& readiness() const { return readiness_; }
  /// Are gradients of this pass added to those of earlier micro-batches?
  bool adds() const { return adds_; }

  /// Where the model writes gradients in a pass that does not add.
  std::byte* arena() const { return arena_; }
  /// Where the model writes gradients in a pass that adds; allocated at the first call.
  std::byte* second_arena() {
    if (!second_) second_.emplace(layout_.plan().bytes);
    return second_->data();
  }
  /// This rank's sums over micro-batches; invalid for buckets whose reductions are in flight.
  template <class T>
  std::span<T> own(std::size_t offset, std::size_t bytes) const {
    return elements_at<T>(arena_, offset, bytes);
  }
  template <class T>
  std::span<T> written(std::size_t parameter) const {
    if constexpr (Traits::frees_gradients)
      return piece_of<T>(ring_.arena_of(layout_.plan().placements[parameter].bucket), parameter);
    return piece_of<T>(adds_ ? second_->data() : arena_, parameter);
  }
  /// Averages over ranks: in place of the gradients, unless they are reduced in another type.
  template <class T>
  std::span<ReduceType<T>> averages(std::size_t offset, std::size_t bytes) const {
    return elements_at<ReduceType<T>>(averages_, offset / sizeof(T) * sizeof(ReduceType<T>),
                                      bytes / sizeof(T) * sizeof(ReduceType<T>));
  }
  /// The averages of this rank's slice of a bucket, where it keeps no others.
  template <class T>
  std::span<ReduceType<T>> slice_averages(std::size_t b) const {
    return ring_.template slice<T>(b);
  }
  /// A parameter's gradient in its slot of the ring, which is claimed at first.
  auto freed_gradient(auto key) {
    layout_.require_trained(key);
    const std::size_t parameter = tensor_index<typename Traits::model, TensorRole::parameter>(key);
    const std::size_t b = parameter < layout_.infos().size()
                              ? layout_.plan().placements[parameter].bucket
                              : 0;  // rejected where its view is made
    if (!ring_.holds(b)) claim(b, parameter);
    return layout_.template view<typename Traits::memory, false>(ring_.arena_of(b), key);
  }
  std::size_t bytes() const {
    if constexpr (Traits::frees_gradients) return ring_.bytes();
    return layout_.plan().bytes * (second_ ? 2 : 1) + reduce_bytes_;
  }

  // A backward pass.

  /// `Sync::yes`: buckets are reduced over ranks as they complete. `live`: this rank has samples.
  void begin_backward(Sync sync, bool adds, bool live = true) {
    if constexpr (Traits::frees_gradients) {
      reduce();
      ring_.forget_holders();
    }
    synchronizes_ = sync == Sync::yes;
    adds_ = adds;
    if constexpr (reduces_late) is_in_backward_ = true;
    next_ = 0;
    readiness_.reset();
    features_.each([&](auto& feature) { feature.before_backward(*this, live); });
    if (synchronizes_) before_reductions(live);
  }

  template <class Key>
  void ready(Key key) {
    using Model = typename Traits::model;
    const std::size_t parameter = tensor_index<Model, TensorRole::parameter>(key);
    readiness_.mark(parameter);
    if constexpr (TensorListing<Model>) {
      Traits::with_element(layout_.infos()[parameter].element,
                           [&]<class T>(std::type_identity<T>) { take<T>(parameter); });
    } else {
      constexpr TensorInfo info = NamedTensor<Model, TensorRole::parameter, Key>::info;
      take<ElementOf<Traits::parameter_types::of(info.element)>>(parameter);
    }
    start_complete_buckets();
  }

  /// Weights the gradients of later passes; weights have a mean of 1 over ranks.
  void weigh(double weight) { weight_ = weight; }

  /// Counts a parameter's missing gradient as zero; with a ring, `end_backward` does so.
  void unused(std::size_t parameter)
    requires(Traits::skips_unused)
  {
    if constexpr (!Traits::frees_gradients) {
      take_as_zero(parameter);
      start_complete_buckets();
    }
  }

  void end_backward() {
    if constexpr (reduces_late) {
      is_in_backward_ = false;
      start_complete_buckets();
    }
    features_.each([&](auto& feature) { feature.after_backward(*this); });
    if (!readiness_.all_ready()) reject_missing();
    // A captured micro-batch must end with every collective that it started.
    if constexpr (Traits::frees_gradients && Traits::captures) reduce();
  }

  void pass_without_samples(Sync sync, bool adds) {
    begin_backward(sync, adds, false);
    take_missing_as_zero();
  }

  /// Counts missing gradients as zero, bucket by bucket: a ring frees one bucket for the next.
  void take_missing_as_zero() {
    for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) {
      for (const std::size_t p : layout_.plan().members(b)) {
        if (!readiness_.is_ready(p)) take_as_zero(p);
      }
      start_complete_buckets();
    }
  }

  /// Scales the accumulated gradients. No bucket may be in flight.
  void scale_own(double factor) {
    const auto scale = [&]<class T>(std::type_identity<T>, const Bucket& bucket) {
      execution_.scale(own<T>(bucket.offset, bucket.bytes), factor);
    };
    Traits::for_each_typed(layout_.plan().buckets(), scale);
  }

  /// Starts the reductions of passes that did not synchronize.
  void start_late() {
    if constexpr (Traits::frees_gradients) return;  // every pass has reduced its gradients
    synchronizes_ = true;
    next_ = 0;
    before_reductions(true);
    start_complete_buckets();
  }

  // For updaters, which take what they need: whole averages need not exist.

  /// Averages a bucket over ranks, or waits for its reduction in flight. **Ranks** all, in the
  /// order of buckets. **Host** blocks, or on a GPU the compute stream waits.
  void wait(std::size_t b) {
    if constexpr (Traits::reduces) {
      if (!features_.needs_bucket(*this, b)) return;
      const Bucket& bucket = layout_.plan().bucket_table[b];
      [[maybe_unused]] const typename Traits::span span({"wait for bucket", b, bucket.bytes});
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        if constexpr (Traits::frees_gradients) {
          if (!reductions_.template is_in_flight<T>(b)) return;
          reductions_.template wait<T>(b);
          ring_.template keep<T>(execution_, b, adds_);
        } else if constexpr (Traits::reduces_early) {
          reductions_.template wait<T>(b);
        } else {
          comm_.all_reduce(own<T>(bucket.offset, bucket.bytes),
                           reduction_of_gradients<how>(comm_.world_size().value()),
                           step_call<Traits, JobCall::backward>());
        }
      });
      features_.each([&](auto& feature) { feature.bucket_reduced(*this, b); });
    }
  }

  void reduce() {
    for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) wait(b);
  }

  /// Reduces, and applies the factors that were left to readers, for a program that reads averages.
  /// **Ranks** all. **Host** as `wait`; with `DivideByLive` blocks.
  void average() {
    reduce();
    if constexpr (Traits::scatters_buckets) gather_averages();
    if constexpr (folds || Features::divides_averages) {
      const double factor = this->factor() / features_.divisor(*this);
      if (factor == 1) return;
      const auto scale = [&]<class T>(std::type_identity<T>, const Bucket& bucket) {
        execution_.scale(averages<T>(bucket.offset, bucket.bytes), factor);
      };
      Traits::for_each_typed(layout_.plan().buckets(), scale);
    }
  }

  /// The factor that turns the result of `reduce` into averages.
  double factor() const { return folded_factor(how, comm_.world_size().value()); }

  auto& reductions() { return reductions_; }

 private:
  void before_reductions(bool live) {
    features_.each([&](auto& feature) { feature.before_reductions(*this, live); });
  }

  /// Weights a written gradient, where shares differ in size, and adds it to earlier micro-batches.
  template <class T>
  void take(std::size_t parameter) {
    features_.each([&](auto& feature) { feature.template gradient_ready<T>(*this, parameter); });
    if constexpr (Traits::weighs_shares) {
      if (weight_ != 1) execution_.scale(written<T>(parameter), weight_);
    }
    if constexpr (!Traits::frees_gradients) {
      if (adds_)
        execution_.add(piece_of<T>(arena_, parameter), std::span<const T>(written<T>(parameter)));
    }
  }

  void start_complete_buckets() {
    if constexpr (Traits::reduces_early) {
      constexpr std::size_t most =
          Traits::shards ? most_shards_in_flight<Comm> : std::size_t{Comm::most_in_flight};
      if (!synchronizes_ && !Traits::frees_gradients) return;
      if (reduces_late && is_in_backward_) return;
      const auto& plan = layout_.plan();
      for (; next_ != plan.bucket_count && readiness_.is_complete(next_); ++next_) {
        if (!features_.needs_bucket(*this, next_)) continue;
        if (next_ >= most) wait(next_ - most);
        Traits::with_element(plan.bucket_table[next_].element,
                             [&]<class T>(std::type_identity<T>) { start<T>(next_); });
      }
    }
  }
  /// Starts the reduction of a bucket and the join flags behind it.
  template <class T>
  void start(std::size_t b) {
    const Bucket& bucket = layout_.plan().bucket_table[b];
    const auto start = [&](std::span<T> own, std::span<ReduceType<T>> sent) {
      [[maybe_unused]] const typename Traits::span span({"bucket ready", b, sent.size_bytes()});
      if constexpr (!std::is_same_v<T, ReduceType<T>>) execution_.cast(sent, own);
      reductions_.template start<T>(b, sent);
    };
    if constexpr (Traits::frees_gradients) {
      start(elements_at<T>(ring_.arena_of(b), bucket.offset, bucket.bytes),
            ring_.template reduce_slot<T>(b));
    } else {
      const std::size_t bytes =
          bucket.bytes + flags_behind<Traits>(b, comm_.world_size()) * sizeof(T);
      start(own<T>(bucket.offset, bytes), averages<T>(bucket.offset, bytes));
    }
  }

  /// All-gathers the reduced slices. **Ranks** all. **Host** as `wait`.
  void gather_averages() {
    const auto gather = [&]<class T>(std::type_identity<T>, const Bucket& bucket) {
      const auto& space = reductions_.space();
      const auto whole = averages<T>(bucket.offset, bucket.bytes);
      space.gather(space.template pieces<T>(whole.data(), whole.size())).wait();
    };
    Traits::for_each_typed(layout_.plan().buckets().subspan(Traits::joins ? 1 : 0), gather);
  }

  void take_as_zero(std::size_t p) {
    const Placement& placement = layout_.plan().placements[p];
    if constexpr (Traits::frees_gradients) {
      if (!ring_.holds(placement.bucket)) claim(placement.bucket, p);
      execution_.zero(ring_.arena_of(placement.bucket) + placement.offset, placement.bytes);
    } else if (!adds_) {
      execution_.zero(arena_ + placement.offset, placement.bytes);
    }
    readiness_.mark(p);
  }

  [[noreturn, gnu::cold, gnu::noinline]] void reject_missing() const {
    const auto all = [](std::size_t) { return true; };
    throw Error("backward", "no gradient came for " + readiness_.missing_names(all),
                "let backward write and mark every parameter, or add UnusedParameters<Zero>");
  }

  /// Gives a bucket its slot of the ring, after the earlier bucket there has been reduced.
  [[gnu::noinline]] void claim(std::size_t b, std::size_t parameter) {
    const std::size_t earlier = ring_.holder(b);
    if (b >= next_ + ring_.slots())
      reject_gradient(parameter, " was asked for before those of later layers were complete");
    if (earlier != no_bucket) {
      if (earlier > b) reject_gradient(parameter, " was asked for when its bucket had been sent");
      for (std::size_t k = 0; k <= earlier; ++k) wait(k);  // in the same order on all ranks
    }
    ring_.take(b);
    ring_.clear_padding(execution_, b);
    features_.each([&](auto& feature) { feature.bucket_claimed(*this, b); });
  }
  [[noreturn, gnu::cold, gnu::noinline]] void reject_gradient(std::size_t parameter,
                                                              std::string_view when) const {
    fail("backward", {"the gradient of ", layout_.name(parameter), when},
         "write gradients last layer first, and ask for each when it is written; "
         "this job's Sharding keeps few at a time");
  }

  std::byte* make_arena() {
    if constexpr (Traits::frees_gradients) return nullptr;
    return reinterpret_cast<std::byte*>(
        comm_.template allocate<std::uint8_t>(layout_.plan().bytes).data());
  }
  std::byte* make_reduce_arena() {
    std::byte* arena = arena_;
    if constexpr (Traits::frees_gradients) return arena;
    Traits::with_element(
        layout_.plan().bucket_table[0].element, [&]<class T>(std::type_identity<T>) {
          if constexpr (!std::is_same_v<T, ReduceType<T>>) {
            const auto all =
                comm_.template allocate<ReduceType<T>>(layout_.plan().bytes / sizeof(T));
            reduce_bytes_ = all.size_bytes();
            arena = reinterpret_cast<std::byte*>(all.data());
          }
        });
    return arena;
  }
  /// Allocates all memory of later steps now: an allocation may wait for other ranks' GPUs.
  void foresee() {
    if constexpr (Traits::micro_batches > 1 && !Traits::frees_gradients) second_arena();
    if constexpr (requires { comm_.reserve(std::size_t{1}); }) {
      std::size_t most = 0;
      for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) {
        const Bucket& bucket = layout_.plan().bucket_table[b];
        const std::size_t count = bucket.count() + flags_behind<Traits>(b, comm_.world_size());
        Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
          most = std::max(most, count * sizeof(Accumulator<ReduceType<T>>));
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
  std::size_t reduce_bytes_ = 0;  // of `averages_`, where they have memory of their own
  std::byte* averages_;
  std::optional<typename Execution::Arena> second_;
  Readiness<layout_type> readiness_;
  [[no_unique_address]] Features features_;
  ReductionsOf<Traits, Comm> reductions_;
  bool synchronizes_ = false;
  bool adds_ = false;
  [[maybe_unused]] bool is_in_backward_ = false;  // where reductions wait for its end
  double weight_ = 1;                             // of this rank's gradients
  std::size_t next_ = 0;                          // the next bucket to reduce
};

}  // namespace lockstep::detail

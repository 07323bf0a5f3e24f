// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A step as a fixed list of stages, and the features that act at them.

#include "lockstep/detail/core/standard.hpp"

namespace lockstep::detail {

/// Every stage as a no-op: a feature derives from this and hides the stages at which it acts. It is
/// a template so that the empty bases of several features are distinct types.
///
/// `replica` is the job's `Replica`; `gradients` are its `GradientBuckets`, which have what
/// features share. A feature is constructed from them, allocates only in its constructor, and names
/// no other feature. Captured steps contain the stages from `before_backward` to `after_update`:
/// what varies from step to step must be part of `graph_key`, or be written before a graph begins.
template <class Feature>
struct Stages {
  /// Before every micro-batch, replayed or not; never captured.
  static constexpr void prepare(std::uint64_t /*updates*/, std::size_t /*micro_batch*/) {}
  /// A backward pass begins. `live`: this rank has a batch.
  static constexpr void before_backward(auto&, bool /*live*/) {}
  /// Reductions of buckets may start.
  static constexpr void before_reductions(auto&, bool /*live*/) {}
  /// A bucket got a slot, where gradients are freed.
  static constexpr void bucket_claimed(auto&, std::size_t /*bucket*/) {}
  /// The model has written a gradient of elements T.
  template <class T>
  static constexpr void gradient_ready(auto&, std::size_t /*parameter*/) {}
  /// Is a bucket reduced? Only if every feature says so.
  static constexpr bool needs_bucket(const auto&, std::size_t /*bucket*/) { return true; }
  /// A bucket's average is readable.
  static constexpr void bucket_reduced(auto&, std::size_t /*bucket*/) {}
  /// The model has written all gradients that it writes; missing ones are handled now.
  static constexpr void after_backward(auto&) {}
  /// A divisor of averages that the program reads.
  static constexpr bool divides_averages = false;
  static constexpr double divisor(auto&) { return 1; }
  /// The parameters were updated, or all gradients discarded.
  static constexpr void after_update() {}

  /// The model's step, extended by the feature.
  template <class Step>
  using View = Step;
  template <class Step>
  static constexpr const Step& view(const Step& step, auto& /*replica*/) {
    return step;  // NOLINT(bugprone-return-const-ref-from-parameter): the caller has it
  }

  // Around a graph. These are not captured.

  /// A number that differs where the work of the next micro-batch does.
  static constexpr std::uint64_t graph_key() { return 0; }
  /// Keeps the state on the host that a captured micro-batch changes, and restores it.
  static constexpr void snapshot() {}
  static constexpr void rollback() {}
};

/// The type of a step that features have extended, one after the other.
template <class Step>
std::type_identity<Step> extended_step() {
  return {};
}
template <class Step, class First, class... Rest>
auto extended_step() {
  return extended_step<typename First::template View<Step>, Rest...>();
}

/// The features of a job, one after the other at every stage (see `Stages`).
template <class... F>
struct FeatureSet : F... {
  explicit FeatureSet([[maybe_unused]] auto& gradients) : F(gradients)... {}

  /// Calls `stage(feature)` for all features, in order.
  void each([[maybe_unused]] const auto& stage) { (stage(static_cast<F&>(*this)), ...); }
  bool needs_bucket([[maybe_unused]] const auto& gradients, [[maybe_unused]] std::size_t b) const {
    return (F::needs_bucket(gradients, b) && ...);
  }
  static constexpr bool divides_averages = (F::divides_averages || ...);
  double divisor([[maybe_unused]] auto& gradients) { return (1.0 * ... * F::divisor(gradients)); }

  template <class Step>
  using View = typename decltype(extended_step<Step, F...>())::type;
  template <class Step>
  View<Step> view(const Step& step, [[maybe_unused]] auto& replica) {
    return stack<F...>(step, replica);
  }

  std::uint64_t graph_key() const {
    std::uint64_t key = 0;
    ((key = 31 * key + F::graph_key()), ...);
    return key;
  }

 private:
  template <class... Rest, class Step>
    requires(sizeof...(Rest) == 0)
  static const Step& stack(const Step& step, auto& /*replica*/) {
    return step;  // NOLINT(bugprone-return-const-ref-from-parameter): the caller has it
  }
  template <class First, class... Rest, class Step>
  auto stack(const Step& step, auto& replica) {
    return stack<Rest...>(First::view(step, replica), replica);
  }
};

/// A feature, instantiated only if it applies to the job; `+` joins features.
template <bool Applies, class Feature>
using If = std::type_identity<std::conditional_t<Applies, FeatureSet<Feature>, FeatureSet<>>>;
template <class... A, class... B>
std::type_identity<FeatureSet<A..., B...>> operator+(std::type_identity<FeatureSet<A...>>,
                                                     std::type_identity<FeatureSet<B...>>);

}  // namespace lockstep::detail

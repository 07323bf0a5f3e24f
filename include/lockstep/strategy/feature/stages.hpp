// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The stages of a step, at which features act.

#include <cstddef>
#include <cstdint>

#include "lockstep/comm/call.hpp"

namespace lockstep::detail {

/// Every stage as a no-op: a feature derives from this and hides the stages at which it acts. It is
/// a template so that the empty bases of several features are distinct types.
///
/// `replica` is the job's `Replica`; `gradients` are its `GradientBuckets`, which have what
/// features share: the communicator, the execution, the layout, the memory of gradients, which of
/// them are there, and the pass. A feature is constructed from them, allocates in its constructor
/// alone, and names no other feature. Stages from `before_backward` to `after_update` are captured
/// where steps are: what varies from step to step must be part of `graph_key`, or be written before
/// a graph begins.
template <class Feature>
struct Stages {
  /// Before every micro-batch, replayed or not; it is not captured.
  static constexpr void prepare(std::uint64_t /*updates*/, std::size_t /*micro_batch*/) {}
  /// A forward pass begins, of a micro-batch that synchronizes.
  static constexpr void before_forward(auto& /*replica*/, JobCall) {}
  /// A backward pass begins; no gradient is there. `live`: this rank has a batch.
  static constexpr void before_backward(auto&, bool /*live*/) {}
  /// Buckets may travel from now on.
  static constexpr void before_reductions(auto&, bool /*live*/) {}
  /// A bucket got memory, where that is handed out bucket by bucket.
  static constexpr void bucket_claimed(auto&, std::size_t /*bucket*/) {}
  /// The model has written a gradient, whose elements are of type T.
  template <class T>
  static constexpr void gradient_ready(auto&, std::size_t /*parameter*/) {}
  /// Is a bucket reduced at all? It is if every feature says so.
  static constexpr bool needs_bucket(const auto&, std::size_t /*bucket*/) { return true; }
  /// A bucket's average is readable.
  static constexpr void bucket_reduced(auto&, std::size_t /*bucket*/) {}
  /// The model has written all gradients that it writes: missing ones are treated.
  static constexpr void after_backward(auto&) {}
  /// Gradients become averages that the program may look at: they are divided by this.
  static constexpr bool divides_averages = false;
  static constexpr double divisor(auto&) { return 1; }
  /// The optimizer has updated the parameters, or all gradients were forgotten.
  static constexpr void after_update() {}

  /// The step that the model sees, with what the feature adds to it.
  template <class Step>
  using View = Step;
  template <class Step>
  static constexpr const Step& view(const Step& step, auto& /*replica*/) {
    return step;
  }

  // Around a graph. These are not captured.

  /// A number that differs where the work of the next micro-batch does.
  static constexpr std::uint64_t graph_key() { return 0; }
  /// What a micro-batch changes on the host, and how it is taken back.
  struct Nothing {};
  static constexpr Nothing snapshot() { return {}; }
  static constexpr void rollback(const Nothing&) {}
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The compile-time part of a job: its policies, its layout, its fingerprint.

#include <cstdint>

#include "lockstep/bucket/layout.hpp"
#include "lockstep/bucket/step.hpp"
#include "lockstep/model/fingerprint.hpp"
#include "lockstep/model/shapes.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/strategy/sharding_traits.hpp"
#include "lockstep/trainer/axes.hpp"

namespace lockstep::detail {

/// A model under canonical policies, one per axis.
template <class Model, class Policies>
struct ComposedJob {
  using model_type = Model;
  using policies = Policies;

  /// The policy that answers an axis: `Job::policy<axes::Backend>`.
  template <class Axis>
  using policy = Pick<Axis, Policies>;

  using memory = typename policy<axes::Device>::choice::memory;
  using plan_rules = typename ShardingTraits<Policies>::plan_rules;
  using layout = Layout<Model, plan_rules>;
  using buffer_layout = BufferLayout<Model>;

  /// The step a model sees in a world of one.
  using bare_step = BareStep<Model, plan_rules, memory>;

  /// The fingerprint, the same on all ranks. It is a constant for a model of static shapes.
  static constexpr std::uint64_t fingerprint()
    requires(!is_dynamic_model<Model>)
  {
    return fingerprint_of<Policies>(layout{}, buffer_layout{});
  }
  static std::uint64_t fingerprint(const Model& model) {
    return fingerprint_of<Policies>(layout(model), buffer_layout(model));
  }
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Trainer<Model, Policies...>`: a model and an order-free pack of policies as one type.

#include <cstdint>
#include <type_traits>

#include "lockstep/bucket/bare_step.hpp"
#include "lockstep/bucket/layout.hpp"
#include "lockstep/model/fingerprint.hpp"
#include "lockstep/model/tensor_table.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/trainer/axes.hpp"
#include "lockstep/trainer/composition.hpp"

namespace lockstep {

/// A job: what the compiler knows of it. `Policies` is canonical, one per axis.
template <class Model, class Policies>
class BasicTrainer {
 public:
  using model_type = Model;
  using policies = Policies;

  /// The policy that answers an axis: `Job::policy<axes::Backend>`.
  template <class Axis>
  using policy = Pick<Axis, Policies>;

  using memory = typename policy<axes::Device>::choice::memory;
  using layout = Layout<Model, policy<axes::Buckets>>;
  using buffer_layout = BufferLayout<Model>;

  /// The step a model sees in a world of one.
  using bare_step = BareStep<Model, policy<axes::Buckets>, memory>;

  /// What all ranks must agree on. A constant for a model of static shapes.
  static constexpr std::uint64_t fingerprint()
    requires(!is_dynamic_model<Model>)
  {
    return fingerprint_of<Model, Policies>(parameter_table<Model>.infos, buffer_table<Model>.infos);
  }
  static std::uint64_t fingerprint(const Model& model) {
    return fingerprint_of<Model, Policies>(layout(model).infos(), buffer_layout(model).infos());
  }
};

/// What stands for a job whose composition was rejected, so that one error stays one error.
struct RejectedTrainer {};

namespace detail {
template <class Model, class... Ps>
consteval auto compose() {
  if constexpr (require_composition<Model, Ps...>()) {
    return std::type_identity<BasicTrainer<Model, CanonicalPolicies<Ps...>>>{};
  } else {
    return std::type_identity<RejectedTrainer>{};
  }
}
}  // namespace detail

/// The job of a model under policies in any order: `Trainer<M, A, B>` and `Trainer<M, B, A>` are
/// one type. What does not go together is one sentence from the compiler.
template <class Model, class... Ps>
using Trainer = typename decltype(detail::compose<Model, Ps...>())::type;

}  // namespace lockstep

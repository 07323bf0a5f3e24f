// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The replica of a wrapper for hand-written loops, from the policies that a program lists:
/// those that act in such a loop, and one compile error for each of the others.

#include <concepts>
#include <type_traits>

#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/policy/policy.hpp"
#include "lockstep/strategy/policies.hpp"
#include "lockstep/strategy/replica.hpp"
#include "lockstep/topology/world.hpp"
#include "lockstep/torch/loop_gradients.hpp"
#include "lockstep/torch/namespace.hpp"
#include "lockstep/trainer/axes.hpp"
#include "lockstep/trainer/connection.hpp"
#include "lockstep/trainer/rejected.hpp"

namespace lockstep {

inline namespace torch_modules {

/// The types of a module's parameters, where they are not all float: stands among the policies of
/// `lockstep::torch::DistributedDataParallel<Net, ParameterTypes<float, double>>`.
template <Element... Ts>
struct ParameterTypes {};

}  // namespace torch_modules

namespace detail {

template <class P>
inline constexpr bool is_parameter_types = false;
template <class... Ts>
inline constexpr bool is_parameter_types<ParameterTypes<Ts...>> = true;

/// The axes of which every policy acts in a program's own loop.
template <class Axis>
concept AxisOfLoops = std::same_as<Axis, axes::Device> || std::same_as<Axis, axes::Backend> ||
                      std::same_as<Axis, axes::World> || std::same_as<Axis, axes::Progress> ||
                      std::same_as<Axis, axes::Groups> || std::same_as<Axis, axes::Buckets> ||
                      std::same_as<Axis, axes::Frozen> || std::same_as<Axis, axes::Norms> ||
                      std::same_as<Axis, axes::UnevenInputs>;

/// Does a policy act in a program's own loop? Of axes that are named neither here nor above, none
/// does. What is no policy of a job, or has arguments that make no sense, is left to the check of
/// all jobs.
template <class P>
consteval bool acts_in_loop() {
  if constexpr (!Policy<P>) {
    return true;
  } else if constexpr (!P::well_formed || !answers<typename P::axis>(CanonicalPolicies<>::pack{})) {
    return true;
  } else if constexpr (AxisOfLoops<typename P::axis>) {
    return true;
  } else if constexpr (PolicyOf<P, axes::Hooks>) {
    return !P::skips_zero_gradients && !P::stages::averages_parameters;
  } else if constexpr (PolicyOf<P, axes::UnusedParameters>) {
    return SubgraphsIn<typename P::choice>::count <= 1;
  } else if constexpr (PolicyOf<P, axes::Anomaly>) {
    return !std::is_same_v<typename P::choice, Skip>;
  } else if constexpr (PolicyOf<P, axes::Buffers>) {
    return !std::is_same_v<typename P::choice, Synced>;
  } else {
    // A program may say what its loop is in any case.
    return std::is_same_v<P, ParallelStrategy<DDP>> || std::is_same_v<P, Sharding<Replicated>> ||
           std::is_same_v<P, Precision<AsDeclared>> || std::is_same_v<P, EagerStep> ||
           std::is_same_v<P, Feed<Own>>;
  }
}

/// Sorts what a program lists into types of parameters, policies that act and others.
template <class Types, class Acting, class Others, class... Given>
struct SortLoopPolicies {
  using types = Types;
  using acting = Acting;
  using others = Others;
};
template <class Types, class... Acting, class... Others, class First, class... Rest>
  requires is_parameter_types<First>
struct SortLoopPolicies<Types, PolicyPack<Acting...>, PolicyPack<Others...>, First, Rest...>
    : SortLoopPolicies<First, PolicyPack<Acting...>, PolicyPack<Others...>, Rest...> {};
template <class Types, class... Acting, class... Others, class First, class... Rest>
  requires(!is_parameter_types<First> && acts_in_loop<First>())
struct SortLoopPolicies<Types, PolicyPack<Acting...>, PolicyPack<Others...>, First, Rest...>
    : SortLoopPolicies<Types, PolicyPack<Acting..., First>, PolicyPack<Others...>, Rest...> {};
template <class Types, class... Acting, class... Others, class First, class... Rest>
  requires(!is_parameter_types<First> && !acts_in_loop<First>())
struct SortLoopPolicies<Types, PolicyPack<Acting...>, PolicyPack<Others...>, First, Rest...>
    : SortLoopPolicies<Types, PolicyPack<Acting...>, PolicyPack<Others..., First>, Rest...> {};

template <class P, class... Axes>
concept PolicyOfAny = (PolicyOf<P, Axes> || ...);

/// Gives a compile error for policies that do not act in a program's own loop.
template <class Pack>
struct RequireNoOthers;
template <class... Ps>
struct RequireNoOthers<PolicyPack<Ps...>> {
  template <class... Axes>
  static constexpr bool names = (PolicyOfAny<Ps, Axes...> || ...);
  template <class P>
  static consteval bool averages_parameters() {
    if constexpr (PolicyOf<P, axes::Hooks>) return P::stages::averages_parameters;
    return false;
  }
  template <class P>
  static consteval bool skips_zero_gradients() {
    if constexpr (PolicyOf<P, axes::Hooks>) return P::skips_zero_gradients;
    return false;
  }

  static_assert(
      !names<axes::Optimizer, axes::ParameterGroups, axes::Clip, axes::Accumulate, axes::Schedule>,
      "lockstep: this wrapper leaves the update to the program; use LibTorch's "
      "optimizers with their groups, clip_grad_norm_ and no_sync(), or a Trainer with a "
      "TorchModel, which has the policies Optimizer, ParameterGroups, Clip, Accumulate "
      "and Schedule");
  static_assert(!names<axes::Anomaly> && !(skips_zero_gradients<Ps>() || ...),
                "lockstep: Anomaly<Skip> and SkipZeroGradients leave updates out, and here the "
                "program makes them; look at the gradients before optimizer.step(), or use a "
                "Trainer with a TorchModel");
  static_assert(!(averages_parameters<Ps>() || ...),
                "lockstep: LocalSGD averages parameters after updates of lockstep's; use a Trainer "
                "with a TorchModel");
  static_assert(!names<axes::Buffers>,
                "lockstep: Buffers<Synced> averages buffers where a job evaluates and saves, and "
                "here the program does both; use Buffers<Broadcast> or Buffers<Local>, or a "
                "Trainer with a TorchModel");
  static_assert(!names<axes::ParallelStrategy, axes::LossPlacement>,
                "lockstep: this wrapper is ParallelStrategy<DDP>, and every rank has its own loss; "
                "DP is lockstep::torch::DataParallel<Net>, and LossOnReplica is for a Trainer "
                "with a TorchModel");
  static_assert(!names<axes::Sampler, axes::Feed>,
                "lockstep: here the program loads its data; give LibTorch's loader a RankSampler, "
                "or use a Trainer with a TorchModel, which has the policies Sampler and Feed");
  static_assert(!names<axes::Sharding>,
                "lockstep: LibTorch's optimizers update all parameters on every rank; leave "
                "Sharding out, or use a Trainer with a TorchModel");
  static_assert(!names<axes::StepExecution, axes::Precision>,
                "lockstep: CapturedStep and Precision need a step that lockstep runs; use a "
                "Trainer with a TorchModel");
  static_assert(!names<axes::UnusedParameters>,
                "lockstep: Subgraphs are for declared models; add UnusedParameters<Zero>, with "
                "which autograd says what a pass has used");

  /// Axes that have a sentence above.
  template <class P>
  static constexpr bool is_explained =
      PolicyOfAny<P, axes::Optimizer, axes::ParameterGroups, axes::Clip, axes::Accumulate,
                  axes::Schedule, axes::Anomaly, axes::Hooks, axes::Buffers, axes::ParallelStrategy,
                  axes::LossPlacement, axes::Sampler, axes::Feed, axes::Sharding,
                  axes::StepExecution, axes::Precision, axes::UnusedParameters>;
  static_assert((is_explained<Ps> && ...),
                "lockstep: one of these policies does nothing in a program's own loop; leave it "
                "out, or use a Trainer with a TorchModel");
};

/// The replica of a wrapper, from policies that act.
template <class Model, class Pack>
struct LoopReplica;
template <class Model, class... Ps>
struct LoopReplica<Model, PolicyPack<Ps...>> {
  template <class M, class Policies>
  using Of = Replica<M, Policies, CommunicatorOf<Policies>>;
  using policies = CanonicalPolicies<Ps...>;
  using type = Compose<Of, RejectedWrapper, Model, Ps...>;
  static_assert(PickOr<World<dynamic>, Ps...>::static_size != 1,
                "lockstep: World<1> has nobody to average with; leave it out, or the wrapper");
  static_assert(std::is_same_v<PickOr<Groups<>, Ps...>, Groups<>> ||
                    PickOr<Norms<Local>, Ps...>::in_group,
                "lockstep: in a program's own loop Groups<...> are for Norms<Synced, WithinGroup> "
                "alone; add it, or make groups of your own with new_group(...)");
};

template <class Pack>
struct WithReplicated;
template <class... Ps>
struct WithReplicated<PolicyPack<Ps...>>
    : std::conditional_t<(PolicyOf<Ps, axes::Sharding> || ...),
                         std::type_identity<PolicyPack<Ps...>>,
                         std::type_identity<PolicyPack<Ps..., Sharding<Replicated>>>> {};

template <class Net, class Types>
struct LoopModelOf;
template <class Net, class... Ts>
struct LoopModelOf<Net, ParameterTypes<Ts...>> : std::type_identity<LoopModule<Net, Ts...>> {};

template <class Net, class... Ps>
struct LoopJob {
  using Sorted = SortLoopPolicies<ParameterTypes<>, PolicyPack<>, PolicyPack<>, Ps...>;
  static_assert(sizeof(RequireNoOthers<typename Sorted::others>) != 0);
  using Model = typename LoopModelOf<Net, typename Sorted::types>::type;
  using Chosen = LoopReplica<Model, typename WithReplicated<typename Sorted::acting>::type>;
  using replica = typename Chosen::type;
  using policies = typename Chosen::policies;
  using communicator = CommunicatorOf<policies>;
};

}  // namespace detail

}  // namespace lockstep

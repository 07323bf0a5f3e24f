// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The replica of a wrapper for hand-written loops, from the policies that a program lists,
/// and what such a loop cannot have.

#include <type_traits>

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

/// The model and the policies of a wrapper, from what the program lists.
template <class Net, class Types, class... Ps>
struct LoopComposition;
template <class Net, class... Ts, class... Ps>
struct LoopComposition<Net, ParameterTypes<Ts...>, PolicyPack<Ps...>> {
  using Model = LoopModule<Net, Ts...>;

  template <class Axis>
  static constexpr bool names = (PolicyOf<Ps, Axis> || ...);
  static_assert(!names<axes::Optimizer> && !names<axes::Clip> && !names<axes::Accumulate> &&
                    !names<axes::Schedule>,
                "lockstep: this wrapper leaves the update to the program: use LibTorch's "
                "optimizers, clip_grad_norm_ and no_sync(), or a Trainer with a TorchModel, which "
                "has the policies Optimizer, Clip, Accumulate and Schedule");
  static_assert(std::is_same_v<PickOr<Sharding<Replicated>, Ps...>, Sharding<Replicated>>,
                "lockstep: LibTorch's optimizers update all parameters on every rank: leave "
                "Sharding out, or use a Trainer with a TorchModel");
  static_assert(PickOr<World<dynamic>, Ps...>::static_size != 1,
                "lockstep: World<1> has nobody to average with: leave it out, or the wrapper");

  static auto policies() {
    if constexpr (names<axes::Sharding>) {
      return std::type_identity<PolicyPack<Ps...>>{};
    } else {
      return std::type_identity<PolicyPack<Ps..., Sharding<Replicated>>>{};
    }
  }
};

template <class Model, class Pack>
struct LoopReplica;
template <class Model, class... Ps>
struct LoopReplica<Model, PolicyPack<Ps...>> {
  template <class M, class Policies>
  using Of = Replica<M, Policies, CommunicatorOf<Policies>>;
  using policies = CanonicalPolicies<Ps...>;
  using type = Compose<Of, RejectedWrapper, Model, Ps...>;
  static_assert(!type::traits::averages_parameters,
                "lockstep: LocalSGD averages parameters after updates of lockstep's: use a Trainer "
                "with a TorchModel");
  static_assert(!type::traits::captures && !type::traits::scales_loss,
                "lockstep: CapturedStep and Precision<ScaledLoss> need a step that lockstep runs: "
                "use a Trainer with a TorchModel");
  static_assert(!type::traits::has_subgraphs,
                "lockstep: Subgraphs are for declared models: add UnusedParameters<Zero>, with "
                "which autograd says what a pass has used");
};

/// Sorts what a program lists into types and policies.
template <class Types, class Sorted, class... Given>
struct SortLoopPolicies {
  using types = Types;
  using policies = Sorted;
};
template <class Types, class... Sorted, class First, class... Rest>
struct SortLoopPolicies<Types, PolicyPack<Sorted...>, First, Rest...>
    : std::conditional_t<is_parameter_types<First>,
                         SortLoopPolicies<First, PolicyPack<Sorted...>, Rest...>,
                         SortLoopPolicies<Types, PolicyPack<Sorted..., First>, Rest...>> {};

template <class Net, class... Ps>
struct LoopJob {
  using Sorted = SortLoopPolicies<ParameterTypes<>, PolicyPack<>, Ps...>;
  using Composition = LoopComposition<Net, typename Sorted::types, typename Sorted::policies>;
  using Model = typename Composition::Model;
  using Chosen = LoopReplica<Model, typename decltype(Composition::policies())::type>;
  using replica = typename Chosen::type;
  using policies = typename Chosen::policies;
  using communicator = CommunicatorOf<policies>;
};

}  // namespace detail

}  // namespace lockstep

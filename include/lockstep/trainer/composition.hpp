// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which models and policies go together: the rules, and the first one that is broken.

#include <cstddef>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/core/name.hpp"
#include "lockstep/hook/hook.hpp"
#include "lockstep/model/output.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/policy/policy.hpp"
#include "lockstep/trainer/axes.hpp"
#include "lockstep/trainer/model_faults.hpp"
#include "lockstep/trainer/verdict.hpp"

namespace lockstep {

namespace detail {

/// Finds faults of the policies, each alone and then together, before any is used.
template <class... Ps>
consteval Finding find_policy_fault() {
  using All = CanonicalPolicies<>::pack;
  if constexpr ((BareChoice<Ps> || ...)) {
    return {Fault::choice_without_policy};
  } else if constexpr (!(Policy<Ps> && ...)) {
    return {Fault::unknown_policy};
  } else {
    Finding found;
    const auto note = [&found](bool wrong, Fault fault, std::string_view axis) {
      if (wrong && found.fault == Fault::none) found = {fault, axis};
    };
    (note(!answers<typename Ps::axis>(All{}), Fault::unknown_policy, Ps::axis::name), ...);
    (note(policies_for<typename Ps::axis, Ps...> != 1, Fault::policy_given_twice, Ps::axis::name),
     ...);
    (note(!Ps::well_formed, Fault::wrong_choice, Ps::axis::name), ...);
    if constexpr ((Ps::well_formed && ...)) {
      (note(!Ps::built(), Fault::choice_not_built, Ps::axis::name), ...);
    }
    return found;
  }
}

template <class Precision>
inline constexpr bool mixes_supported_types = true;
template <class... Types>
inline constexpr bool mixes_supported_types<Mixed<Types...>> =
    ((std::is_same_v<Types, float> || std::is_same_v<Types, Half> ||
      std::is_same_v<Types, BFloat16>) &&
     ...);

/// Finds hooks that cannot be, and policies that do not go with hooks.
template <class Policies>
consteval Finding find_hook_fault() {
  using Given = Pick<axes::Hooks, Policies>;
  if (!Given::has_stages) return {};
  if (!Given::stages::has_good_numbers) return {Fault::hook_out_of_range};
  if (!Given::stages::is_in_order) return {Fault::hooks_out_of_order};
  if (std::is_same_v<typename Pick<axes::ParallelStrategy, Policies>::choice, DP>)
    return {Fault::hooks_with_dp};
  if (std::is_same_v<typename Pick<axes::Sharding, Policies>::choice, HostShared>)
    return {Fault::hooks_with_host_shared};
  if (Given::stages::averages_parameters &&
      (std::is_same_v<typename Pick<axes::Anomaly, Policies>::choice, Skip> ||
       Pick<axes::Precision, Policies>::choice::scales_loss))
    return {Fault::local_sgd_with_skip};
  if (Given::stages::averages_parameters &&
      std::is_same_v<typename Pick<axes::Sharding, Policies>::choice, ZeroRedundancy>)
    return {Fault::local_sgd_with_shards};
  return {};
}

/// Finds what does not go with ranks that are through before others.
template <class Policies>
consteval Finding find_join_fault() {
  if (!Pick<axes::UnevenInputs, Policies>::joins) return {};
  if (std::is_same_v<typename Pick<axes::ParallelStrategy, Policies>::choice, DP>)
    return {Fault::join_with_dp};
  if (Pick<axes::StepExecution, Policies>::captures) return {Fault::join_with_captured};
  if (ShardingTraits<Policies>::shares_parameters) return {Fault::join_with_shared};
  if (SubgraphsIn<typename Pick<axes::UnusedParameters, Policies>::choice>::same_on_all_ranks)
    return {Fault::join_with_same_subgraph};
  if (!Pick<axes::Hooks, Policies>::stages::only_convert) return {Fault::join_with_hooks};
  return {};
}

/// Finds groups of ranks that a job cannot have.
template <class Policies>
consteval Finding find_job_groups_fault() {
  using Divided = Pick<axes::Groups, Policies>;
  if (!std::is_same_v<Divided, Groups<>> &&
      std::is_same_v<typename Pick<axes::ParallelStrategy, Policies>::choice, DP>)
    return {Fault::groups_with_dp};
  if (!Divided::template fits<Pick<axes::World, Policies>::static_size>)
    return {Fault::groups_of_other_world};
  return {};
}

/// Finds ranks that cannot be fed.
template <class Policies>
consteval Finding find_feed_fault() {
  if (!Pick<axes::Feed, Policies>::sends) return {};
  if (std::is_same_v<typename Pick<axes::ParallelStrategy, Policies>::choice, DP>)
    return {Fault::feed_with_dp};
  if (std::is_same_v<Pick<axes::Groups, Policies>, Groups<>>) return {Fault::feed_without_groups};
  if (Pick<axes::UnevenInputs, Policies>::joins) return {Fault::feed_with_join};
  return {};
}

/// Finds what does not go with statistics that ranks take together.
template <class Policies>
consteval Finding find_norm_fault() {
  using Given = Pick<axes::Norms, Policies>;
  if (!Given::is_synced) return {};
  if (Given::in_group && std::is_same_v<Pick<axes::Groups, Policies>, Groups<>>)
    return {Fault::norms_without_groups};
  if (Pick<axes::UnevenInputs, Policies>::joins) return {Fault::norms_with_join};
  // Replicas of DP are told one sub-graph.
  using Sets = SubgraphsIn<typename Pick<axes::UnusedParameters, Policies>::choice>;
  if (std::is_same_v<typename Pick<axes::ParallelStrategy, Policies>::choice, DDP> &&
      Pick<axes::World, Policies>::static_size != 1 && Sets::count > 1 && !Sets::same_on_all_ranks)
    return {Fault::norms_with_union};
  return {};
}

/// Finds what does not go with gradients that are given away.
template <class Policies>
consteval Finding find_freed_fault() {
  if (!ShardingTraits<Policies>::frees_gradients) return {};
  if (ShardingTraits<Policies>::joins) return {Fault::freed_with_join};
  if (Pick<axes::Hooks, Policies>::has_stages) return {Fault::freed_with_hooks};
  return {};
}

/// Finds policies that do not go together, or not with the model.
template <class Model, class Policies>
consteval Finding find_combination_fault() {
  constexpr bool on_cpu = std::is_same_v<Pick<axes::Device, Policies>, Device<Cpu>>;
  using Transport = typename Pick<axes::Backend, Policies>::choice;
  constexpr bool is_ddp =
      std::is_same_v<typename Pick<axes::ParallelStrategy, Policies>::choice, DDP>;
  if (Pick<axes::World, Policies>::static_size == 0) return {Fault::world_of_zero};
  if (Pick<axes::Accumulate, Policies>::micro_batches == 0) return {Fault::accumulate_zero};
  if (!(Pick<axes::Clip, Policies>::norm > 0)) return {Fault::clip_not_positive};
  constexpr Finding frozen = find_frozen_fault<Model, Policies>();
  if constexpr (frozen.fault != Fault::none) return frozen;
  constexpr Finding group =
      find_group_fault<Model, Policies>(Pick<axes::ParameterGroups, Policies>{});
  if constexpr (group.fault != Fault::none) return group;
  constexpr Finding subgraphs = find_subgraphs_fault<Model, Policies>();
  if constexpr (subgraphs.fault != Fault::none) return subgraphs;
  if (on_cpu &&
      (std::is_same_v<Transport, Nccl> || std::is_same_v<Transport, Hierarchical<Shm, Nccl>>))
    return {Fault::nccl_on_cpu};
  if (std::is_same_v<typename Pick<axes::Sharding, Policies>::choice, HostShared> &&
      !shares_memory<Pick<axes::ParallelStrategy, Policies>, Pick<axes::Device, Policies>,
                     Pick<axes::Backend, Policies>>) {
    return {Fault::shared_without_shm};
  }
  using Types = typename Pick<axes::Precision, Policies>::choice;
  if (!std::is_same_v<Types, AsDeclared>) {
    if (on_cpu) return {Fault::mixed_on_cpu};
    constexpr const auto& declared = kinds_of<Model, TensorRole::parameter>;
    if (!std::is_same_v<Types, ScaledLoss> &&
        (!mixes_supported_types<Types> || declared.size != 1 ||
         declared.kinds[0] != ElementKind::f32))
      return {Fault::mixed_of_other_types};
  }
  if (Pick<axes::StepExecution, Policies>::captures) {
    if (on_cpu) return {Fault::captured_on_cpu};
    if (std::is_same_v<typename Pick<axes::UnusedParameters, Policies>::choice, Zero>)
      return {Fault::captured_with_unused};
    using Sets = SubgraphsIn<typename Pick<axes::UnusedParameters, Policies>::choice>;
    if (is_ddp && Pick<axes::World, Policies>::static_size != 1 && Sets::count > 1 &&
        !Sets::same_on_all_ranks)
      return {Fault::captured_with_union};
    if (is_ddp && std::is_same_v<typename Pick<axes::Sampler, Policies>::remainder, Exact>)
      return {Fault::captured_with_exact};
    if (is_ddp && Pick<axes::World, Policies>::static_size != 1 &&
        !std::is_same_v<Transport, Nccl> && !std::is_same_v<Transport, Shm>)
      return {Fault::captured_through_host};
  }
  if (!is_ddp && OutputNaming<Model> && !OutputDeclaring<Model> &&
      std::is_same_v<Pick<axes::LossPlacement, Policies>, LossOnOutput>) {
    return {Fault::malformed_output};
  }
  constexpr Finding freed = find_freed_fault<Policies>();
  if constexpr (freed.fault != Fault::none) return freed;
  constexpr Finding uneven = find_join_fault<Policies>();
  if constexpr (uneven.fault != Fault::none) return uneven;
  constexpr Finding groups = find_job_groups_fault<Policies>();
  if constexpr (groups.fault != Fault::none) return groups;
  constexpr Finding feed = find_feed_fault<Policies>();
  if constexpr (feed.fault != Fault::none) return feed;
  constexpr Finding norms = find_norm_fault<Policies>();
  if constexpr (norms.fault != Fault::none) return norms;
  return find_hook_fault<Policies>();
}

template <class Model, class... Ps>
consteval Finding find_fault() {
  if constexpr (Policy<Model> || BareChoice<Model>) {
    return {Fault::model_not_first};
  } else if constexpr (!std::is_class_v<Model>) {
    return {Fault::model_no_class};
  } else {
    constexpr Finding policies = find_policy_fault<Ps...>();
    if constexpr (policies.fault != Fault::none) {
      return policies;
    } else {
      constexpr Finding model = find_model_fault<Model>();
      if constexpr (model.fault != Fault::none) {
        return model;
      } else {
        return find_combination_fault<Model, CanonicalPolicies<Ps...>>();
      }
    }
  }
}

template <std::size_t Size>
consteval Name<Size + 1> to_name(std::string_view text) {
  Name<Size + 1> name;
  for (std::size_t i = 0; i != Size; ++i) name.text[i] = text[i];
  return name;
}

}  // namespace detail

/// The first fault of a composition, `Fault::none` for a legal one. It is never a compile error, so
/// tools and tests can ask for it.
template <class Model, class... Ps>
inline constexpr detail::Fault composition_fault = detail::find_fault<Model, Ps...>().fault;

namespace detail {

/// Gives one compile error if the composition has a fault.
template <class Model, class... Ps>
consteval bool require_composition() {
  constexpr Finding finding = find_fault<Model, Ps...>();
  constexpr auto culprit = to_name<finding.culprit.size()>(finding.culprit);
  static_cast<void>(sizeof(Verdict<finding.fault, culprit>));
  return finding.fault == Fault::none;
}

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which models and policies go together: the rules, and the first one that is broken.

#include <cstddef>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/layout.hpp"
#include "lockstep/core/name.hpp"
#include "lockstep/hook/hook.hpp"
#include "lockstep/model/output.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/policy/policy.hpp"
#include "lockstep/trainer/axes.hpp"
#include "lockstep/trainer/messages.hpp"
#include "lockstep/trainer/model_faults.hpp"

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

/// What the rules below ask about a job.
struct JobFacts {
  // Ranks.
  std::size_t world;
  bool is_ddp, on_cpu, shares_memory, has_groups, groups_fit, is_fed, joins;
  bool by_nccl, through_host;  // the backend
  bool has_malformed_output;
  // The step.
  std::size_t micro_batches;
  bool clips_nothing, captures, skips_updates, is_mixed, mixes_others, has_unused;
  bool has_subgraphs, same_subgraph;
  bool is_host_shared, is_zero, frees_gradients, shares_parameters;
  bool syncs_norms, syncs_norms_in_group, is_exact;
  bool has_hooks, has_good_hooks, hooks_in_order, averages_parameters, hooks_only_convert;

  /// Do ranks choose sub-graphs by themselves? Replicas of DP are told one.
  constexpr bool chooses_subgraphs() const {
    return is_ddp && world != 1 && has_subgraphs && !same_subgraph;
  }
};

template <class Model, class Policies>
consteval JobFacts facts_of() {
  using Strategy = Pick<axes::ParallelStrategy, Policies>;
  using Place = Pick<axes::Device, Policies>;
  using Transport = Pick<axes::Backend, Policies>;
  using Through = typename Transport::choice;
  using World = Pick<axes::World, Policies>;
  using Divided = Pick<axes::Groups, Policies>;
  using Types = typename Pick<axes::Precision, Policies>::choice;
  using Unused = typename Pick<axes::UnusedParameters, Policies>::choice;
  using Sets = SubgraphsIn<Unused>;
  using Shards = typename Pick<axes::Sharding, Policies>::choice;
  using Stages = Pick<axes::Hooks, Policies>;
  JobFacts job{};
  job.world = World::static_size;
  job.is_ddp = std::is_same_v<typename Strategy::choice, DDP>;
  job.on_cpu = std::is_same_v<Place, Device<Cpu>>;
  job.shares_memory = shares_memory<Strategy, Place, Transport>;
  job.has_groups = !std::is_same_v<Divided, Groups<>>;
  job.groups_fit = Divided::template fits<World::static_size>;
  job.is_fed = Pick<axes::Feed, Policies>::sends;
  job.joins = Pick<axes::UnevenInputs, Policies>::joins;
  job.by_nccl = std::is_same_v<Through, Nccl> || std::is_same_v<Through, Hierarchical<Shm, Nccl>>;
  job.through_host = !std::is_same_v<Through, Nccl> && !std::is_same_v<Through, Shm>;
  job.has_malformed_output = OutputNaming<Model> && !OutputDeclaring<Model> &&
                             std::is_same_v<Pick<axes::LossPlacement, Policies>, LossOnOutput>;
  job.micro_batches = Pick<axes::Accumulate, Policies>::micro_batches;
  job.clips_nothing = !(Pick<axes::Clip, Policies>::norm > 0);
  job.captures = Pick<axes::StepExecution, Policies>::captures;
  job.skips_updates =
      std::is_same_v<typename Pick<axes::Anomaly, Policies>::choice, Skip> || Types::scales_loss;
  job.is_mixed = !std::is_same_v<Types, AsDeclared>;
  constexpr const auto& declared = kinds_of<Model, TensorRole::parameter>;
  job.mixes_others = job.is_mixed && !std::is_same_v<Types, ScaledLoss> &&
                     !(mixes_supported_types<Types> && declared.size == 1 &&
                       declared.kinds[0] == ElementKind::f32);
  job.has_unused = std::is_same_v<Unused, Zero>;
  job.has_subgraphs = Sets::count > 1;
  job.same_subgraph = Sets::same_on_all_ranks;
  job.is_host_shared = std::is_same_v<Shards, HostShared>;
  job.is_zero = std::is_same_v<Shards, ZeroRedundancy>;
  job.frees_gradients = ShardingTraits<Policies>::frees_gradients;
  job.shares_parameters = ShardingTraits<Policies>::shares_parameters;
  job.syncs_norms = Pick<axes::Norms, Policies>::is_synced;
  job.syncs_norms_in_group = Pick<axes::Norms, Policies>::in_group;
  job.is_exact = std::is_same_v<typename Pick<axes::Sampler, Policies>::remainder, Exact>;
  job.has_hooks = Stages::has_stages;
  job.has_good_hooks = Stages::stages::has_good_numbers;
  job.hooks_in_order = Stages::stages::is_in_order;
  job.averages_parameters = Stages::stages::averages_parameters;
  job.hooks_only_convert = Stages::stages::only_convert;
  return job;
}

/// The rules of policies that do not go together, or not with the model: the first that a job
/// breaks. Its sentence is in messages.hpp.
consteval Fault find_combination_fault(const JobFacts& job) {
  const bool is_dp = !job.is_ddp;
  const struct {
    bool broken;
    Fault fault;
  } rules[] = {
      {job.world == 0, Fault::world_of_zero},
      {job.micro_batches == 0, Fault::accumulate_zero},
      {job.clips_nothing, Fault::clip_not_positive},
      {job.on_cpu && job.by_nccl, Fault::nccl_on_cpu},
      {job.is_host_shared && !job.shares_memory, Fault::shared_without_shm},
      {job.is_mixed && job.on_cpu, Fault::mixed_on_cpu},
      {job.mixes_others, Fault::mixed_of_other_types},
      {job.captures && job.on_cpu, Fault::captured_on_cpu},
      {job.captures && job.has_unused, Fault::captured_with_unused},
      {job.captures && job.chooses_subgraphs(), Fault::captured_with_union},
      {job.captures && job.is_ddp && job.is_exact, Fault::captured_with_exact},
      {job.captures && job.is_ddp && job.world != 1 && job.through_host,
       Fault::captured_through_host},
      {is_dp && job.has_malformed_output, Fault::malformed_output},
      {job.frees_gradients && job.joins, Fault::freed_with_join},
      {job.frees_gradients && job.has_hooks, Fault::freed_with_hooks},
      {job.joins && is_dp, Fault::join_with_dp},
      {job.joins && job.captures, Fault::join_with_captured},
      {job.joins && job.shares_parameters, Fault::join_with_shared},
      {job.joins && job.same_subgraph, Fault::join_with_same_subgraph},
      {job.joins && !job.hooks_only_convert, Fault::join_with_hooks},
      {job.has_groups && is_dp, Fault::groups_with_dp},
      {!job.groups_fit, Fault::groups_of_other_world},
      {job.is_fed && is_dp, Fault::feed_with_dp},
      {job.is_fed && !job.has_groups, Fault::feed_without_groups},
      {job.is_fed && job.joins, Fault::feed_with_join},
      {job.syncs_norms_in_group && !job.has_groups, Fault::norms_without_groups},
      {job.syncs_norms && job.joins, Fault::norms_with_join},
      {job.syncs_norms && job.chooses_subgraphs(), Fault::norms_with_union},
      {job.has_hooks && !job.has_good_hooks, Fault::hook_out_of_range},
      {job.has_hooks && !job.hooks_in_order, Fault::hooks_out_of_order},
      {job.has_hooks && is_dp, Fault::hooks_with_dp},
      {job.has_hooks && job.is_host_shared, Fault::hooks_with_host_shared},
      {job.averages_parameters && job.skips_updates, Fault::local_sgd_with_skip},
      {job.averages_parameters && job.is_zero, Fault::local_sgd_with_shards},
  };
  for (const auto& rule : rules) {
    if (rule.broken) return rule.fault;
  }
  return Fault::none;
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
        using Policies = CanonicalPolicies<Ps...>;
        constexpr Fault fault = find_combination_fault(facts_of<Model, Policies>());
        if constexpr (fault != Fault::none) {
          return {fault};
        } else {
          return find_selection_fault<Model, Policies>();
        }
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

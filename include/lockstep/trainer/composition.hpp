// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which models and policies go together: the rules, and the first one that is broken.

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/layout.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/name.hpp"
#include "lockstep/hook/hook.hpp"
#include "lockstep/model/declaration.hpp"
#include "lockstep/model/output.hpp"
#include "lockstep/model/shapes.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/model/tensor_list.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/policy/policy.hpp"
#include "lockstep/trainer/axes.hpp"
#include "lockstep/trainer/messages.hpp"

namespace lockstep {

namespace detail {

/// A fault, and the name of what has it.
struct Finding {
  Fault fault = Fault::none;
  std::string_view culprit = "";
};

/// Is there nothing before, between or after the dots? (`string_view::find` would do, but under the
/// undefined-behaviour sanitizer g++ 12 does not take it for a constant here.)
consteval bool has_empty_part(std::string_view name) {
  char before = '.';
  for (const char c : name) {
    if (c == '.' && before == '.') return true;
    before = c;
  }
  return before == '.';
}

/// Finds faults of one role's tensors, in a list that is known to be well-formed.
template <class Model, TensorRole Role>
consteval Finding find_tensor_fault() {
  constexpr const auto& table = tensor_table<Model, Role>;
  for (std::size_t i = 0; i != table.size(); ++i) {
    const TensorInfo& info = table.infos[i];
    const std::string_view name = table.name(i);
    if (info.element == ElementKind::unsupported) return {Fault::unsupported_element, name};
    if (Role == TensorRole::parameter && !is_floating(info.element)) {
      return {Fault::integer_parameter, name};
    }
    if (has_empty_part(name)) return {Fault::tensor_without_name, name};
  }
  const std::size_t beyond = first_beyond_arena(table.infos);
  if (beyond != table.size()) return {Fault::tensor_too_large, table.name(beyond)};
  constexpr std::size_t duplicate = name_index<Model, Role>.find_duplicate();
  if constexpr (duplicate != not_found) return {Fault::name_declared_twice, table.name(duplicate)};
  return {};
}

/// A LibTorch module or a holder of one, as far as its names show it: this header does not include
/// LibTorch.
template <class M>
concept LooksLikeTorchModule = requires { typename M::ContainedType; } || requires(M& candidate) {
  candidate.named_parameters();
  candidate.named_buffers();
  candidate.is_training();
};

template <class Model>
consteval Finding find_model_fault() {
  if constexpr (TensorListing<Model>) {  // its tensors are checked when they are listed
    if (kinds_of<Model, TensorRole::parameter>.size == 0) return {Fault::model_without_parameters};
    return {};
  } else if constexpr (!requires { typename Model::Parameters; }) {
    if (LooksLikeTorchModule<Model>) return {Fault::torch_module};
    return {Fault::model_without_parameters};
  } else if constexpr (!DeclarationListOf<typename Model::Parameters, TensorRole::parameter>) {
    return {Fault::malformed_parameters};
  } else if constexpr (!DeclarationListOf<DeclaredList<Model, TensorRole::buffer>,
                                          TensorRole::buffer>) {
    return {Fault::malformed_buffers};
  } else if constexpr (Model::Parameters::tensors == 0) {
    return {Fault::model_without_parameters};
  } else {
    constexpr Finding parameters = find_tensor_fault<Model, TensorRole::parameter>();
    if constexpr (parameters.fault != Fault::none) return parameters;
    constexpr Finding buffers = find_tensor_fault<Model, TensorRole::buffer>();
    if constexpr (buffers.fault != Fault::none) return buffers;
    for (std::size_t i = 0; i != buffer_table<Model>.size(); ++i) {
      const std::string_view name = buffer_table<Model>.name(i);
      if (name_index<Model, TensorRole::parameter>.find(name) != not_found)
        return {Fault::name_declared_twice, name};
    }
    if constexpr (is_dynamic_model<Model>) {
      if constexpr (!ShapeGiving<Model>) return {Fault::shapes_not_given};
    }
    return {};
  }
}

/// The first of several findings that is one.
consteval Finding first_of(std::initializer_list<Finding> findings) {
  for (const Finding& finding : findings) {
    if (finding.fault != Fault::none) return finding;
  }
  return {};
}

/// Finds patterns of a set that match none of a model's parameters.
template <class Set>
consteval Finding find_pattern_fault(const auto& parameters) {
  if constexpr (requires { Set::patterns; }) {
    for (const std::string_view pattern : Set::patterns) {
      bool found = false;
      for (std::size_t i = 0; i != parameters.size() && !found; ++i)
        found = matches(pattern, parameters.name(i));
      if (!found) return {Fault::pattern_without_match, pattern};
    }
  }
  return {};
}

/// Finds what leaves no parameter to train: the frozen ones (`Still`), a group, or a sub-graph.
template <class Still>
consteval Finding find_frozen_fault(const auto& parameters) {
  for (std::size_t i = 0; i != parameters.size(); ++i) {
    if (!Still::match(parameters.name(i))) return find_pattern_fault<Still>(parameters);
  }
  return {Fault::everything_frozen};
}

template <class Still, class... Sets>
consteval Finding find_group_fault(ParameterGroups<Sets...>, const auto& parameters) {
  using Groups = ParameterGroups<Sets...>;
  const Finding pattern = first_of({Finding{}, find_pattern_fault<Sets>(parameters)...});
  if (pattern.fault != Fault::none) return pattern;
  bool has_one[Groups::count] = {};
  for (std::size_t i = 0; i != parameters.size(); ++i) {
    if (!Still::match(parameters.name(i)))
      has_one[Groups::group_of(parameters.name(i), parameters.infos[i].rank)] = true;
  }
  for (std::size_t group = 1; group != Groups::count; ++group) {
    constexpr std::string_view numbers = "123456789";
    if (!has_one[group])
      return {Fault::group_without_parameters,
              numbers.substr(std::min(group, numbers.size()) - 1, 1)};
  }
  return {};
}

template <class Still, class Set>
consteval Finding find_subgraph_fault(const auto& parameters) {
  for (std::size_t i = 0; i != parameters.size(); ++i) {
    if (Set::match(parameters.name(i)) && !Still::match(parameters.name(i)))
      return find_pattern_fault<Set>(parameters);
  }
  return first_of({find_pattern_fault<Set>(parameters),
                   Finding{Fault::subgraph_without_parameters, Set::name}});
}
template <class Still, bool Same, class... Sets>
consteval Finding find_subgraph_fault_of(SubgraphList<Same, Sets...>, const auto& parameters) {
  return first_of({Finding{}, find_subgraph_fault<Still, Sets>(parameters)...});
}

/// Finds faults of the declared sub-graphs, whatever the model.
template <bool Same, class... Sets>
consteval Finding find_list_fault(SubgraphList<Same, Sets...>) {
  using List = SubgraphList<Same, Sets...>;
  if (List::count == 1) return {Fault::subgraphs_not_declared};
  if (sizeof...(Sets) > (Same ? most_compared_subgraphs : std::size_t{31}))
    return {Fault::too_many_subgraphs};
  for (std::size_t set = 1; set != List::count; ++set) {
    if (List::name_of(set).empty() || List::number_of(List::name_of(set)) != set)
      return {Fault::subgraph_declared_twice, List::name_of(set)};
  }
  return {};
}

/// Finds faults of what policies select among the model's parameters. Listed ones are checked when
/// the model lists them.
template <class Model, class Policies>
consteval Finding find_selection_fault() {
  using Still = Pick<axes::Frozen, Policies>;
  using Meaning = typename Pick<axes::UnusedParameters, Policies>::choice;
  constexpr bool has_list = requires { typename Meaning::list; };
  Finding list;
  if constexpr (has_list) list = find_list_fault(typename Meaning::list{});
  if constexpr (TensorListing<Model>) {
    return list;
  } else {
    constexpr const auto& parameters = parameter_table<Model>;
    Finding sets;
    if constexpr (has_list)
      sets = find_subgraph_fault_of<Still>(typename Meaning::list{}, parameters);
    return first_of({find_frozen_fault<Still>(parameters),
                     find_group_fault<Still>(Pick<axes::ParameterGroups, Policies>{}, parameters),
                     list, sets});
  }
}

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

/// The rules of policies that do not go together, or not with the model: the first that a job
/// breaks. Its sentence is in messages.hpp.
template <class Model, class Policies>
consteval Finding find_combination_fault() {
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
  constexpr std::size_t world = World::static_size;
  constexpr bool is_ddp = std::is_same_v<typename Strategy::choice, DDP>;
  constexpr bool is_dp = !is_ddp;
  constexpr bool on_cpu = std::is_same_v<Place, Device<Cpu>>;
  constexpr bool ranks_share_memory = shares_memory<Strategy, Place, Transport>;
  constexpr bool has_groups = !std::is_same_v<Divided, Groups<>>;
  constexpr bool groups_fit = Divided::template fits<World::static_size>;
  constexpr bool is_fed = Pick<axes::Feed, Policies>::sends;
  constexpr bool joins = Pick<axes::UnevenInputs, Policies>::joins;
  constexpr bool by_nccl =
      std::is_same_v<Through, Nccl> || std::is_same_v<Through, Hierarchical<Shm, Nccl>>;
  constexpr bool through_host = !std::is_same_v<Through, Nccl> && !std::is_same_v<Through, Shm>;
  constexpr bool has_malformed_output =
      OutputNaming<Model> && !OutputDeclaring<Model> &&
      std::is_same_v<Pick<axes::LossPlacement, Policies>, LossOnOutput>;
  constexpr std::size_t micro_batches = Pick<axes::Accumulate, Policies>::micro_batches;
  constexpr bool clips_nothing = !(Pick<axes::Clip, Policies>::norm > 0);
  constexpr bool captures = Pick<axes::StepExecution, Policies>::captures;
  constexpr bool skips_updates =
      std::is_same_v<typename Pick<axes::Anomaly, Policies>::choice, Skip> || Types::scales_loss;
  constexpr bool is_mixed = !std::is_same_v<Types, AsDeclared>;
  constexpr const auto& declared = kinds_of<Model, TensorRole::parameter>;
  constexpr bool mixes_others = is_mixed && !std::is_same_v<Types, ScaledLoss> &&
                                !(mixes_supported_types<Types> && declared.size == 1 &&
                                  declared.kinds[0] == ElementKind::f32);
  constexpr bool has_unused = std::is_same_v<Unused, Zero>;
  constexpr bool has_subgraphs = Sets::count > 1;
  constexpr bool same_subgraph = Sets::same_on_all_ranks;
  // Do ranks choose sub-graphs by themselves? Replicas of DP are told one.
  constexpr bool chooses_subgraphs = is_ddp && world != 1 && has_subgraphs && !same_subgraph;
  constexpr bool is_host_shared = std::is_same_v<Shards, HostShared>;
  constexpr bool is_zero = std::is_same_v<Shards, ZeroRedundancy>;
  constexpr bool frees_gradients = ShardingTraits<Policies>::frees_gradients;
  constexpr bool shares_parameters = ShardingTraits<Policies>::shares_parameters;
  constexpr bool syncs_norms = Pick<axes::Norms, Policies>::is_synced;
  constexpr bool syncs_norms_in_group = Pick<axes::Norms, Policies>::in_group;
  constexpr bool is_exact =
      std::is_same_v<typename Pick<axes::Sampler, Policies>::remainder, Exact>;
  constexpr bool has_hooks = Stages::has_stages;
  constexpr bool has_good_hooks = Stages::stages::has_good_numbers;
  constexpr bool hooks_in_order = Stages::stages::is_in_order;
  constexpr bool averages_parameters = Stages::stages::averages_parameters;
  constexpr bool hooks_only_convert = Stages::stages::only_convert;
  const struct {
    bool broken;
    Fault fault;
    std::string_view culprit = "";
  } rules[] = {
      {world == 0, Fault::world_of_zero},
      {micro_batches == 0, Fault::accumulate_zero},
      {clips_nothing, Fault::clip_not_positive},
      {on_cpu && by_nccl, Fault::nccl_on_cpu},
      {is_host_shared && !ranks_share_memory, Fault::shared_without_shm},
      {is_mixed && on_cpu, Fault::mixed_on_cpu},
      {mixes_others, Fault::mixed_of_other_types},
      {captures && on_cpu, Fault::captured_on_cpu},
      {captures && has_unused, Fault::captured_with_unused},
      {captures && chooses_subgraphs, Fault::captured_with_union},
      {captures && is_ddp && is_exact, Fault::captured_with_exact},
      {captures && is_ddp && world != 1 && through_host, Fault::captured_through_host},
      {is_dp && has_malformed_output, Fault::malformed_output},
      {frees_gradients && joins, Fault::freed_with_join},
      {frees_gradients && has_hooks, Fault::freed_with_hooks},
      {is_dp && joins, Fault::for_ranks_alone, axes::UnevenInputs::name},
      {joins && captures, Fault::join_with_captured},
      {joins && shares_parameters, Fault::join_with_shared},
      {joins && same_subgraph, Fault::join_with_same_subgraph},
      {joins && !hooks_only_convert, Fault::join_with_hooks},
      {is_dp && has_groups, Fault::for_ranks_alone, axes::Groups::name},
      {!groups_fit, Fault::groups_of_other_world},
      {is_dp && is_fed, Fault::for_ranks_alone, axes::Feed::name},
      {is_fed && !has_groups, Fault::feed_without_groups},
      {is_fed && joins, Fault::feed_with_join},
      {syncs_norms_in_group && !has_groups, Fault::norms_without_groups},
      {syncs_norms && joins, Fault::norms_with_join},
      {syncs_norms && chooses_subgraphs, Fault::norms_with_union},
      {has_hooks && !has_good_hooks, Fault::hook_out_of_range},
      {has_hooks && !hooks_in_order, Fault::hooks_out_of_order},
      {is_dp && has_hooks, Fault::for_ranks_alone, axes::Hooks::name},
      {has_hooks && is_host_shared, Fault::hooks_with_host_shared},
      {averages_parameters && skips_updates, Fault::local_sgd_with_skip},
      {averages_parameters && is_zero, Fault::local_sgd_with_shards},
  };
  for (const auto& rule : rules) {
    if (rule.broken) return {rule.fault, rule.culprit};
  }
  return {};
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
        constexpr Finding rule = find_combination_fault<Model, Policies>();
        if constexpr (rule.fault != Fault::none) {
          return rule;
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

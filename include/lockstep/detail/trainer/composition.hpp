// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The rules for combining models and policies; only the first broken rule is reported.

#include "lockstep/detail/trainer/axes.hpp"

namespace lockstep {

namespace detail {

/// The faults of a composition, in the order in which they are checked.
enum class Fault {
  none,
  model_not_first,
  model_no_class,
  choice_without_policy,
  unknown_policy,
  policy_given_twice,
  wrong_choice,
  torch_module,
  model_without_parameters,
  malformed_parameters,
  malformed_buffers,
  unsupported_element,
  integer_parameter,
  tensor_too_large,
  tensor_without_name,
  name_declared_twice,
  shapes_not_given,
  world_of_zero,
  accumulate_zero,
  clip_not_positive,
  pattern_without_match,
  everything_frozen,
  group_without_parameters,
  subgraphs_not_declared,
  subgraph_without_parameters,
  subgraph_declared_twice,
  too_many_subgraphs,
  nccl_on_cpu,
  shared_without_shm,
  sharded_in_common_memory,
  sharded_torch_module,
  unit_without_parameters,
  mixed_on_cpu,
  mixed_of_other_types,
  captured_on_cpu,
  captured_with_unused,
  captured_with_union,
  captured_with_exact,
  captured_through_host,
  for_ranks_alone,
  malformed_output,
  hook_out_of_range,
  hooks_out_of_order,
  hooks_with_host_shared,
  local_sgd_with_skip,
  local_sgd_with_shards,
  join_with_captured,
  join_with_shared,
  join_with_same_subgraph,
  join_with_hooks,
  groups_of_other_world,
  feed_without_groups,
  feed_with_join,
  freed_with_join,
  freed_with_hooks,
  norms_without_groups,
  norms_with_join,
  norms_with_union,
};

}  // namespace detail

/// One message per fault. The compiler prints this type, and so `Culprit`, an axis or a tensor.
template <detail::Fault F, Name Culprit>
struct CompositionCheck {
  using enum detail::Fault;
  static_assert(F != model_not_first,
                "lockstep: the model comes first: Trainer<Model, Policies...>");
  static_assert(F != model_no_class,
                "lockstep: the model must be a class that declares its parameters and has "
                "forward(step, batch) and backward(step, batch)");
  static_assert(F != choice_without_policy,
                "lockstep: a choice was given without its policy; write Backend<Shm>, not Shm");
  static_assert(F != unknown_policy,
                "lockstep: one of the template arguments is not a policy; after the model come "
                "policies such as ParallelStrategy<DDP>, Backend<Shm> or World<4>");
  static_assert(F != policy_given_twice, "lockstep: a policy was given twice; keep one of the two");
  static_assert(F != wrong_choice,
                "lockstep: a policy was given something that is not one of its choices; "
                "docs/policies.md lists the choices of every policy, and a hook of your own "
                "needs a name and a template Bucket (docs/hooks.md)");
  static_assert(F != torch_module,
                "lockstep: a LibTorch module is no model by itself; wrap it in "
                "lockstep::torch::DistributedDataParallel<Net>, or train a TorchModel<Model, "
                "Net> that says what its loss is");
  static_assert(F != model_without_parameters,
                "lockstep: the model declares no parameters; give it using Parameters = "
                "ParameterList<Parameter<\"weight\", float, 10, 784>, ...>");
  static_assert(F != malformed_parameters,
                "lockstep: the model's Parameters must be a ParameterList of Parameter, Scope "
                "and Repeat, each with at most eight extents");
  static_assert(F != malformed_buffers,
                "lockstep: the model's Buffers must be a BufferList of Buffer, Scope and Repeat, "
                "each with at most eight extents");
  static_assert(F != unsupported_element,
                "lockstep: a tensor's element type is not supported; use double, float, Half, "
                "BFloat16 or an integer of 8 to 64 bits");
  static_assert(F != integer_parameter,
                "lockstep: a parameter of integers has no gradient; declare it as a Buffer");
  static_assert(F != tensor_too_large,
                "lockstep: the model's tensors have more bytes than memory has addresses; check "
                "the extents (the compiler prints the name of the first that is too much)");
  static_assert(F != tensor_without_name,
                "lockstep: a tensor or scope has an empty name; give every one a name");
  static_assert(F != name_declared_twice,
                "lockstep: a name is declared twice; every parameter and buffer needs its own");
  static_assert(F != shapes_not_given,
                "lockstep: the model has dynamic extents but does not say them; give it void "
                "shapes(auto& shape) const with one shape(\"name\"_p, extents...) for each");
  static_assert(F != world_of_zero,
                "lockstep: a world of zero ranks cannot train; write World<1> or more, or "
                "World<dynamic>");
  static_assert(F != accumulate_zero,
                "lockstep: Accumulate<0> would never step; write Accumulate<1> or more");
  static_assert(F != clip_not_positive,
                "lockstep: Clip needs a norm above zero; leave Clip out to clip nothing");
  static_assert(F != pattern_without_match,
                "lockstep: no parameter matches a pattern of Frozen, of a group or of a "
                "sub-graph; compare it with the names in the model's ParameterList (the compiler "
                "prints the pattern beside this message)");
  static_assert(F != everything_frozen,
                "lockstep: Frozen matches every parameter, and nothing is left to train; freeze "
                "fewer");
  static_assert(F != group_without_parameters,
                "lockstep: one of ParameterGroups has no parameter to train; earlier groups or "
                "Frozen have all that it contains (the compiler prints its number, from 1)");
  static_assert(F != subgraphs_not_declared,
                "lockstep: Subgraphs<...> declares no sub-graph; write "
                "Subgraphs<Subgraph<\"with_adapter\", \"fc1.*\", \"adapter.*\">, ...>, or leave "
                "it out");
  static_assert(F != subgraph_without_parameters,
                "lockstep: a sub-graph contains no parameter to train; add a pattern, or freeze "
                "fewer (the compiler prints its name beside this message)");
  static_assert(F != subgraph_declared_twice,
                "lockstep: two sub-graphs have one name, or one has none; give each its own (the "
                "compiler prints the name beside this message)");
  static_assert(F != too_many_subgraphs,
                "lockstep: a job has at most 31 sub-graphs, and 14 with SameOnAllRanks; let one "
                "contain more parameters");
  static_assert(F != nccl_on_cpu,
                "lockstep: Backend<Nccl> moves GPU memory and this is a CPU job; add "
                "Device<Cuda>, or choose Backend<Shm> or Backend<Gloo>");
  static_assert(F != shared_without_shm,
                "lockstep: Sharding<HostShared> needs ranks that share memory; use it with "
                "Device<Cpu> and Backend<Shm>, or choose Sharding<Replicated>");
  static_assert(F != sharded_in_common_memory,
                "lockstep: ranks that share a host's memory keep parameters once already, with "
                "Sharding<HostShared>, the default there; use Sharding<FullyShard> over several "
                "hosts or on GPUs");
  static_assert(F != sharded_torch_module,
                "lockstep: with Sharding<FullyShard> a model asks for parameters unit by unit, and "
                "a LibTorch module holds all of its tensors; use Sharding<ZeroRedundancy, "
                "Gradients>, or a model that declares its parameters");
  static_assert(F != unit_without_parameters,
                "lockstep: no scope or parameter is matched by a pattern of Units; compare it with "
                "the names in the model's ParameterList (the compiler prints the pattern beside "
                "this message)");
  static_assert(F != mixed_on_cpu,
                "lockstep: Precision<Mixed<...>> needs a GPU's arithmetic; add Device<Cuda>, or "
                "leave Precision out: a LibTorch module computes in 16 bits inside of an Autocast");
  static_assert(F != mixed_of_other_types,
                "lockstep: Precision<Mixed<Parameters, Reduction, Buffers>> takes float, Half "
                "and BFloat16, for a model whose parameters are all declared float");
  static_assert(F != captured_on_cpu,
                "lockstep: CapturedStep makes a CUDA graph; add Device<Cuda>, or leave it out");
  static_assert(F != captured_with_unused,
                "lockstep: with UnusedParameters<Zero> the host decides in every step what is "
                "updated, which a captured step cannot change; keep one of the two");
  static_assert(F != captured_with_union,
                "lockstep: ranks that capture a step replay it together and must use one "
                "sub-graph; write Subgraphs<SameOnAllRanks, ...>, or leave CapturedStep out");
  static_assert(F != captured_with_exact,
                "lockstep: with Sampler<Distributed, Exact> ranks can have last batches of "
                "different sizes, and CapturedStep needs all ranks to replay together; use "
                "Padding, DropLast or Masked");
  static_assert(F != captured_through_host,
                "lockstep: with Backend<Gloo> and Backend<Hierarchical<...>> the host takes part "
                "in every reduction, which no CUDA graph can hold; leave CapturedStep out, or "
                "use Backend<Nccl> or Backend<Shm>");
  static_assert(F != for_ranks_alone,
                "lockstep: this policy is for ranks, each with batches of its own, and a job of "
                "ParallelStrategy<DP> is one process whose replicas share a batch; leave it out, "
                "or use ParallelStrategy<DDP> (the compiler prints its name beside this message)");
  static_assert(F != malformed_output,
                "lockstep: the model's Output must be an OutputOf, such as OutputOf<float, 10>, "
                "for ParallelStrategy<DP> to gather it; or use LossOnReplica");
  static_assert(F != hook_out_of_range,
                "lockstep: a hook's number is out of range; PowerSGD needs a rank of 1 or more, "
                "LocalSGD 1 step or more");
  static_assert(F != hooks_out_of_order,
                "lockstep: these hooks cannot follow each other; give one of PowerSGD and "
                "LocalSGD, because each says alone what travels");
  static_assert(F != hooks_with_host_shared,
                "lockstep: Sharding<HostShared> reduces slices where they are used, and hooks "
                "want whole buckets; choose Sharding<Replicated>, or leave the hooks out");
  static_assert(F != local_sgd_with_skip,
                "lockstep: with LocalSGD every rank has gradients of its own, and Anomaly<Skip> "
                "or a loss scale would skip updates on some ranks only; leave one of the two out");
  static_assert(F != local_sgd_with_shards,
                "lockstep: with LocalSGD every rank updates all parameters by itself, and with "
                "Sharding<ZeroRedundancy> its share of them; keep one of the two");
  static_assert(F != join_with_captured,
                "lockstep: with UnevenInputs<Join> exhausted ranks run other work than "
                "those that have batches, and CapturedStep needs all ranks to replay together; "
                "keep one of the two");
  static_assert(F != join_with_shared,
                "lockstep: with UnevenInputs<Join> ranks learn from the first bucket who still "
                "has batches, and Sharding<HostShared> reduces no buckets; choose "
                "Sharding<Replicated>, its default");
  static_assert(F != join_with_same_subgraph,
                "lockstep: with UnevenInputs<Join> an exhausted rank does not know which "
                "sub-graph the others use; leave SameOnAllRanks out of Subgraphs");
  static_assert(F != join_with_hooks,
                "lockstep: with UnevenInputs<Join> ranks learn from the first bucket who still "
                "has batches, and of the hooks only CompressTo brings all of its elements; leave "
                "the others out");
  static_assert(F != groups_of_other_world,
                "lockstep: the topology of Groups<...> is not one of the job's World<N>; give "
                "both the same number of ranks, with groups that divide it, or write "
                "Groups<Grid<dynamic, G>>");
  static_assert(F != feed_without_groups,
                "lockstep: Feed<LeaderOfGroup> and Feed<ScatterThenBroadcast> read for the ranks "
                "of a group, and this job has no groups; add a policy such as Groups<Grid<8, "
                "4>>, or leave Feed out");
  static_assert(F != feed_with_join,
                "lockstep: with UnevenInputs<Join> every rank has data of its own, which no "
                "other can read for it; leave Feed or UnevenInputs<Join> out");
  static_assert(F != freed_with_join,
                "lockstep: with Sharding<ZeroRedundancy, Gradients> and Sharding<FullyShard> every "
                "batch is scattered at once, and exhausted ranks could not answer; use "
                "Sharding<ZeroRedundancy> with UnevenInputs<Join>");
  static_assert(F != freed_with_hooks,
                "lockstep: hooks need whole buckets, of which Sharding<ZeroRedundancy, Gradients> "
                "and Sharding<FullyShard> keep slices; use Sharding<ZeroRedundancy> with Hooks");
  static_assert(F != norms_without_groups,
                "lockstep: Norms<Synced, WithinGroup> takes statistics over a rank's group, and "
                "this job has no groups; add a policy such as Groups<Grid<8, 4>>, or write "
                "Norms<Synced>");
  static_assert(F != norms_with_join,
                "lockstep: with Norms<Synced> every rank's forward waits for the statistics of "
                "all, and with UnevenInputs<Join> an exhausted rank has none to give; keep "
                "one of the two");
  static_assert(F != norms_with_union,
                "lockstep: with Norms<Synced> ranks must run the same norms in every step, which "
                "sub-graphs chosen by each rank do not; write Subgraphs<SameOnAllRanks, ...>, or "
                "use Norms<Local>");
};

namespace detail {

/// A fault, and the name of the axis or tensor that has it.
struct Finding {
  Fault fault = Fault::none;
  std::string_view culprit = "";

  constexpr explicit operator bool() const { return fault != Fault::none; }
};
consteval Finding when(bool broken, Fault fault, std::string_view culprit = "") {
  return broken ? Finding{fault, culprit} : Finding{};
}
consteval Finding first_of(std::initializer_list<Finding> findings) {
  for (const Finding& finding : findings) {
    if (finding) return finding;
  }
  return {};
}

/// Is a part before, between or after dots empty? (`string_view::find` would do, but g++ 12 does
/// not take it for a constant here under the undefined-behaviour sanitizer.)
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

/// A LibTorch module or holder, recognized by names: this header does not include LibTorch.
template <class M>
concept LooksLikeTorchModule = requires { typename M::ContainedType; } || requires(M& candidate) {
  candidate.named_parameters();
  candidate.named_buffers();
  candidate.is_training();
};

template <class Model>
consteval Finding find_model_fault() {
  if constexpr (TensorListing<Model>) {  // tensors are checked when listed
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
    if constexpr (parameters) return parameters;
    constexpr Finding buffers = find_tensor_fault<Model, TensorRole::buffer>();
    if constexpr (buffers) return buffers;
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

/// A pattern of `Units`, as a rule that names units.
struct UnitPattern {
  std::string_view pattern;
  constexpr bool match(std::string_view name) const { return matches(pattern, name); }
};
/// Finds a pattern of `Units` that names no scope and no parameter.
template <class Names>
consteval Finding find_unit_fault(const auto& parameters) {
  for (const std::string_view pattern : Names::patterns) {
    bool found = false;
    for (std::size_t i = 0; i != parameters.size() && !found; ++i)
      found = !unit_of(UnitPattern{pattern}, parameters.name(i)).empty();
    if (!found) return {Fault::unit_without_parameters, pattern};
  }
  return {};
}

/// Does the job train a parameter with `is_chosen(i)`? `Still` are the frozen ones.
template <class Still>
consteval bool trains_any(const auto& parameters, const auto& is_chosen) {
  for (std::size_t i = 0; i != parameters.size(); ++i) {
    if (!Still::match(parameters.name(i)) && is_chosen(i)) return true;
  }
  return false;
}

template <class Still, class... Sets>
consteval Finding find_group_fault(ParameterGroups<Sets...>, const auto& parameters) {
  using Groups = ParameterGroups<Sets...>;
  Finding found = first_of({Finding{}, find_pattern_fault<Sets>(parameters)...});
  for (std::size_t group = 1; group != Groups::count; ++group) {
    constexpr std::string_view numbers = "123456789";
    const auto is_in = [&](std::size_t i) {
      return Groups::group_of(parameters.name(i), parameters.infos[i].rank) == group;
    };
    if (!found && !trains_any<Still>(parameters, is_in))
      found = {Fault::group_without_parameters,
               numbers.substr(std::min(group, numbers.size()) - 1, 1)};
  }
  return found;
}

template <class Still, class Set>
consteval Finding find_subgraph_fault(const auto& parameters) {
  const auto is_in = [&](std::size_t i) { return Set::match(parameters.name(i)); };
  return first_of(
      {find_pattern_fault<Set>(parameters),
       when(!trains_any<Still>(parameters, is_in), Fault::subgraph_without_parameters, Set::name)});
}
template <class Still, class... Sets>
consteval Finding find_subgraph_fault_of(Subgraphs<Sets...>, const auto& parameters) {
  return first_of({Finding{}, find_subgraph_fault<Still, Sets>(parameters)...});
}

/// Finds faults of the declared sub-graphs, for any model.
template <class List>
consteval Finding find_list_fault() {
  if (List::count == 1) return {Fault::subgraphs_not_declared};
  if (List::count - 1 > (List::same_on_all_ranks ? most_compared_subgraphs : std::size_t{31}))
    return {Fault::too_many_subgraphs};
  for (std::size_t set = 1; set != List::count; ++set) {
    if (List::name_of(set).empty() || List::number_of(List::name_of(set)) != set)
      return {Fault::subgraph_declared_twice, List::name_of(set)};
  }
  return {};
}

/// Finds faults of policies' parameter patterns. Listed tensors are checked when listed.
template <class Model, class Policies>
consteval Finding find_selection_fault() {
  using Still = Pick<axes::Frozen, Policies>;
  using Meaning = typename Pick<axes::UnusedParameters, Policies>::choice;
  constexpr bool has_list = declares_subgraphs<Meaning>;
  Finding list;
  if constexpr (has_list) list = find_list_fault<Meaning>();
  if constexpr (TensorListing<Model>) {
    return list;
  } else {
    constexpr const auto& parameters = parameter_table<Model>;
    Finding sets;
    if constexpr (has_list)
      sets = find_subgraph_fault_of<Still>(typename Meaning::sets{}, parameters);
    const bool trains = trains_any<Still>(parameters, [](std::size_t) { return true; });
    using Rules = typename ShardingTraits<Policies>::plan_rules;
    return first_of({when(!trains, Fault::everything_frozen), find_pattern_fault<Still>(parameters),
                     find_group_fault<Still>(Pick<axes::ParameterGroups, Policies>{}, parameters),
                     list, sets, find_unit_fault<typename Rules::units>(parameters)});
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
    return first_of(
        {Finding{},
         when(!answers<typename Ps::axis>(All{}), Fault::unknown_policy, Ps::axis::name)...,
         when(policies_for<typename Ps::axis, Ps...> != 1, Fault::policy_given_twice,
              Ps::axis::name)...,
         when(!Ps::well_formed, Fault::wrong_choice, Ps::axis::name)...});
  }
}

template <class Precision>
inline constexpr bool mixes_supported_types = true;
template <class... Types>
inline constexpr bool mixes_supported_types<Mixed<Types...>> =
    ((std::is_same_v<Types, float> || std::is_same_v<Types, Half> ||
      std::is_same_v<Types, BFloat16>) &&
     ...);

/// The first rule that policies break together, or with the model.
template <class Model, class Policies>
consteval Finding find_combination_fault() {
  using Strategy = Pick<axes::ParallelStrategy, Policies>;
  using DeviceChoice = Pick<axes::Device, Policies>;
  using Transport = Pick<axes::Backend, Policies>;
  using Through = typename Transport::choice;
  using World = Pick<axes::World, Policies>;
  using Divided = Pick<axes::Groups, Policies>;
  using Types = typename Pick<axes::Precision, Policies>::choice;
  using Unused = typename Pick<axes::UnusedParameters, Policies>::choice;
  using Sets = SubgraphsIn<Unused>;
  using Shards = typename Pick<axes::Sharding, Policies>::choice;
  using Stages = Pick<axes::Hooks, Policies>;
  using Hooked = typename Stages::stages;
  using Norm = Pick<axes::Norms, Policies>;
  using Traits = ShardingTraits<Policies>;
  constexpr std::size_t world = World::static_size;
  constexpr bool is_ddp = std::is_same_v<typename Strategy::choice, DDP>;
  constexpr bool is_dp = !is_ddp;
  constexpr bool on_cpu = std::is_same_v<DeviceChoice, Device<Cpu>>;
  constexpr bool has_groups = !std::is_same_v<Divided, Groups<>>;
  constexpr bool is_fed = Pick<axes::Feed, Policies>::sends;
  constexpr bool joins = Pick<axes::UnevenInputs, Policies>::joins;
  constexpr bool through_host = !std::is_same_v<Through, Nccl> && !std::is_same_v<Through, Shm>;
  constexpr bool has_malformed_output =
      OutputNaming<Model> && !OutputDeclaring<Model> &&
      std::is_same_v<Pick<axes::LossPlacement, Policies>, LossOnOutput>;
  constexpr bool captures = Pick<axes::StepExecution, Policies>::captures;
  constexpr bool skips_updates =
      std::is_same_v<typename Pick<axes::Anomaly, Policies>::choice, Skip> || Types::scales_loss;
  constexpr bool is_mixed = !std::is_same_v<Types, AsDeclared>;
  constexpr const auto& declared = kinds_of<Model, TensorRole::parameter>;
  constexpr bool mixes_others = is_mixed && !std::is_same_v<Types, ScaledLoss> &&
                                !(mixes_supported_types<Types> && declared.size == 1 &&
                                  declared.kinds[0] == ElementKind::f32);
  constexpr bool same_subgraph = Sets::same_on_all_ranks;
  // Do ranks choose sub-graphs by themselves? Replicas of DP are told one.
  constexpr bool chooses_subgraphs = is_ddp && world != 1 && Sets::count > 1 && !same_subgraph;
  constexpr bool is_host_shared = std::is_same_v<Shards, HostShared>;
  constexpr bool is_exact =
      std::is_same_v<typename Pick<axes::Sampler, Policies>::remainder, Exact>;
  constexpr bool has_hooks = Stages::has_stages;
  constexpr bool is_fully_sharded = std::is_same_v<Shards, FullyShard>;
  if (world == 0) return {Fault::world_of_zero};
  if (Pick<axes::Accumulate, Policies>::micro_batches == 0) return {Fault::accumulate_zero};
  if (!(Pick<axes::Clip, Policies>::norm > 0)) return {Fault::clip_not_positive};
  if (on_cpu && uses_nccl<Through>) return {Fault::nccl_on_cpu};
  if (is_host_shared && !shares_memory<Strategy, DeviceChoice, Transport>)
    return {Fault::shared_without_shm};
  if (is_fully_sharded && is_dp) return {Fault::for_ranks_alone, axes::Sharding::name};
  if (is_fully_sharded && shares_memory<Strategy, DeviceChoice, Transport>)
    return {Fault::sharded_in_common_memory};
  if (is_fully_sharded && requires { Model::holds_all_parameters; })
    return {Fault::sharded_torch_module};
  if (is_mixed && on_cpu) return {Fault::mixed_on_cpu};
  if (mixes_others) return {Fault::mixed_of_other_types};
  if (captures && on_cpu) return {Fault::captured_on_cpu};
  if (captures && std::is_same_v<Unused, Zero>) return {Fault::captured_with_unused};
  if (captures && chooses_subgraphs) return {Fault::captured_with_union};
  if (captures && is_ddp && is_exact) return {Fault::captured_with_exact};
  if (captures && is_ddp && world != 1 && through_host) return {Fault::captured_through_host};
  if (is_dp && has_malformed_output) return {Fault::malformed_output};
  if (Traits::frees_gradients && joins) return {Fault::freed_with_join};
  if (Traits::frees_gradients && has_hooks) return {Fault::freed_with_hooks};
  if (is_dp && joins) return {Fault::for_ranks_alone, axes::UnevenInputs::name};
  if (joins && captures) return {Fault::join_with_captured};
  if (joins && Traits::shares_parameters) return {Fault::join_with_shared};
  if (joins && same_subgraph) return {Fault::join_with_same_subgraph};
  if (joins && !Hooked::only_convert) return {Fault::join_with_hooks};
  if (is_dp && has_groups) return {Fault::for_ranks_alone, axes::Groups::name};
  if (!Divided::template fits<world>) return {Fault::groups_of_other_world};
  if (is_dp && is_fed) return {Fault::for_ranks_alone, axes::Feed::name};
  if (is_fed && !has_groups) return {Fault::feed_without_groups};
  if (is_fed && joins) return {Fault::feed_with_join};
  if (Norm::in_group && !has_groups) return {Fault::norms_without_groups};
  if (Norm::is_synced && joins) return {Fault::norms_with_join};
  if (Norm::is_synced && chooses_subgraphs) return {Fault::norms_with_union};
  if (has_hooks && !Hooked::has_good_numbers) return {Fault::hook_out_of_range};
  if (has_hooks && !Hooked::is_in_order) return {Fault::hooks_out_of_order};
  if (is_dp && has_hooks) return {Fault::for_ranks_alone, axes::Hooks::name};
  if (has_hooks && is_host_shared) return {Fault::hooks_with_host_shared};
  if (Hooked::averages_parameters && skips_updates) return {Fault::local_sgd_with_skip};
  if (Hooked::averages_parameters && std::is_same_v<Shards, ZeroRedundancy>)
    return {Fault::local_sgd_with_shards};
  return {};
}

template <class Model, class... Ps>
consteval Finding find_invalid() {
  if constexpr (Policy<Model> || BareChoice<Model>) {
    return {Fault::model_not_first};
  } else if constexpr (!std::is_class_v<Model>) {
    return {Fault::model_no_class};
  } else if constexpr (constexpr Finding found = find_policy_fault<Ps...>(); found) {
    return found;
  } else if constexpr (constexpr Finding wrong = find_model_fault<Model>(); wrong) {
    return wrong;
  } else {
    using Policies = CanonicalPolicies<Ps...>;
    constexpr Finding broken = find_combination_fault<Model, Policies>();
    if constexpr (broken) {
      return broken;
    } else {
      return find_selection_fault<Model, Policies>();
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

/// `Fault::none` for a valid composition. Never a compile error, so that tools and tests can ask.
template <class Model, class... Ps>
inline constexpr detail::Fault composition_fault = detail::find_invalid<Model, Ps...>().fault;

namespace detail {

/// Gives one compile error if the composition has a fault.
template <class Model, class... Ps>
consteval bool require_composition() {
  constexpr Finding finding = find_invalid<Model, Ps...>();
  constexpr auto culprit = to_name<finding.culprit.size()>(finding.culprit);
  static_cast<void>(sizeof(CompositionCheck<finding.fault, culprit>));
  return finding.fault == Fault::none;
}

}  // namespace detail

}  // namespace lockstep

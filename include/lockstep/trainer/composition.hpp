// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which models and policies go together. Every composition error of the library is a
/// sentence in `Verdict`, and exactly one of them is printed.

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/core/name.hpp"
#include "lockstep/model/declaration.hpp"
#include "lockstep/model/output.hpp"
#include "lockstep/model/shapes.hpp"
#include "lockstep/model/tensor_table.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/policy/policy.hpp"
#include "lockstep/trainer/axes.hpp"

namespace lockstep {

namespace detail {

/// The faults of a composition, in the order in which they are looked for.
enum class Fault {
  none,
  model_not_first,
  model_no_class,
  choice_without_policy,
  unknown_policy,
  policy_given_twice,
  wrong_choice,
  choice_not_built,
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
  nccl_on_cpu,
  shared_without_shm,
  mixed_on_cpu,
  mixed_of_other_types,
  captured_on_cpu,
  captured_with_unused,
  captured_with_exact,
  captured_through_host,
  malformed_output,
};

}  // namespace detail

/// One sentence per fault. `Culprit`, the name of an axis or a tensor where there is one, is
/// printed by the compiler beside the sentence, because it is in this type.
template <detail::Fault F, Name Culprit>
struct Verdict {
  static_assert(F != detail::Fault::model_not_first,
                "lockstep: the model comes first: Trainer<Model, Policies...>");
  static_assert(F != detail::Fault::model_no_class,
                "lockstep: the model must be a class that declares its parameters and has "
                "forward(step, batch) and backward(step, batch)");
  static_assert(F != detail::Fault::choice_without_policy,
                "lockstep: a choice was given without its policy; write Backend<Shm>, not Shm");
  static_assert(
      F != detail::Fault::unknown_policy,
      "lockstep: one of the template arguments is not a policy; after the model come policies "
      "such as ParallelStrategy<DDP>, Backend<Shm> or World<4>");
  static_assert(F != detail::Fault::policy_given_twice,
                "lockstep: a policy was given twice; keep one of the two");
  static_assert(
      F != detail::Fault::wrong_choice,
      "lockstep: a policy was given something that is not one of its choices; docs/policies.md "
      "lists the choices of every policy");
  static_assert(F != detail::Fault::choice_not_built,
                "lockstep: this choice has its name but is not built yet; docs/policies.md says "
                "what works in this version");
  static_assert(F != detail::Fault::model_without_parameters,
                "lockstep: the model declares no parameters; give it using Parameters = "
                "ParameterList<Parameter<\"weight\", float, 10, 784>, ...>");
  static_assert(
      F != detail::Fault::malformed_parameters,
      "lockstep: the model's Parameters must be a ParameterList of Parameter, Scope and Repeat, "
      "each with at most eight extents");
  static_assert(
      F != detail::Fault::malformed_buffers,
      "lockstep: the model's Buffers must be a BufferList of Buffer, Scope and Repeat, each "
      "with at most eight extents");
  static_assert(
      F != detail::Fault::unsupported_element,
      "lockstep: a tensor's element type is not supported; use double, float, Half, BFloat16 "
      "or an integer of 8 to 64 bits");
  static_assert(F != detail::Fault::integer_parameter,
                "lockstep: a parameter of integers has no gradient; declare it as a Buffer");
  static_assert(
      F != detail::Fault::tensor_too_large,
      "lockstep: the model's tensors have more bytes than memory has addresses; check the "
      "extents (the compiler prints the name of the first that is too much)");
  static_assert(F != detail::Fault::tensor_without_name,
                "lockstep: a tensor or scope has an empty name; give every one a name");
  static_assert(F != detail::Fault::name_declared_twice,
                "lockstep: a name is declared twice; every parameter and buffer needs its own");
  static_assert(F != detail::Fault::shapes_not_given,
                "lockstep: the model has dynamic extents but does not say them; give it void "
                "shapes(auto& shape) const with one shape(\"name\"_p, extents...) for each");
  static_assert(
      F != detail::Fault::world_of_zero,
      "lockstep: a world of zero ranks cannot train; write World<1> or more, or World<dynamic>");
  static_assert(F != detail::Fault::accumulate_zero,
                "lockstep: Accumulate<0> would never step; write Accumulate<1> or more");
  static_assert(F != detail::Fault::clip_not_positive,
                "lockstep: Clip needs a norm above zero; leave Clip out to clip nothing");
  static_assert(F != detail::Fault::pattern_without_match,
                "lockstep: no parameter matches a pattern of Frozen or of a group; compare it with "
                "the names in "
                "the model's ParameterList (the compiler prints the pattern beside this sentence)");
  static_assert(F != detail::Fault::everything_frozen,
                "lockstep: Frozen matches every parameter, and nothing is left to train; freeze "
                "fewer");
  static_assert(F != detail::Fault::group_without_parameters,
                "lockstep: one of ParameterGroups has no parameter to train; earlier groups or "
                "Frozen have all that it contains (the compiler prints its number, from 1)");
  static_assert(
      F != detail::Fault::nccl_on_cpu,
      "lockstep: Backend<Nccl> moves GPU memory and this is a CPU job; add Device<Cuda>, or "
      "choose Backend<Shm> or Backend<Gloo>");
  static_assert(
      F != detail::Fault::shared_without_shm,
      "lockstep: Sharding<HostShared> needs ranks that share memory; use it with Device<Cpu> and "
      "Backend<Shm>, or choose Sharding<Replicated>");
  static_assert(F != detail::Fault::mixed_on_cpu,
                "lockstep: Precision<Mixed<...>> needs a GPU's arithmetic; add Device<Cuda>, or "
                "leave Precision out");
  static_assert(
      F != detail::Fault::mixed_of_other_types,
      "lockstep: Precision<Mixed<Parameters, Reduction, Buffers>> takes float, Half and BFloat16, "
      "for a model whose parameters are all declared float");
  static_assert(F != detail::Fault::captured_on_cpu,
                "lockstep: CapturedStep makes a CUDA graph; add Device<Cuda>, or leave it out");
  static_assert(
      F != detail::Fault::captured_with_unused,
      "lockstep: with UnusedParameters<Zero> the host decides in every step what is updated, which "
      "a captured step cannot change; keep one of the two");
  static_assert(
      F != detail::Fault::captured_with_exact,
      "lockstep: with Sampler<Distributed, Exact> ranks can have last batches of different sizes, "
      "and CapturedStep needs all ranks to replay together; use Padding, DropLast or Masked");
  static_assert(
      F != detail::Fault::captured_through_host,
      "lockstep: with Backend<Gloo> and Backend<Hierarchical<...>> the host takes part in every "
      "reduction, which no CUDA graph can hold; leave CapturedStep out, or use Backend<Nccl> or "
      "Backend<Shm>");
  static_assert(
      F != detail::Fault::malformed_output,
      "lockstep: the model's Output must be an OutputOf, such as OutputOf<float, 10>, for "
      "ParallelStrategy<DP> to gather it; or use LossOnReplica");
};

namespace detail {

struct Finding {
  Fault fault = Fault::none;
  std::string_view culprit = "";
};

/// Finds faults of the policies, each alone and then together, before any is used.
template <class... Ps>
consteval Finding find_policy_fault() {
  using All = CanonicalPolicies<>;
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

template <class Model>
consteval Finding find_model_fault() {
  if constexpr (TensorListing<Model>) {  // its tensors are checked when they are listed
    if (kinds_of<Model, TensorRole::parameter>.size == 0) return {Fault::model_without_parameters};
    return {};
  } else if constexpr (!requires { typename Model::Parameters; }) {
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

template <class Precision>
inline constexpr bool mixes_supported_types = true;
template <class... Types>
inline constexpr bool mixes_supported_types<Mixed<Types...>> =
    ((std::is_same_v<Types, float> || std::is_same_v<Types, Half> ||
      std::is_same_v<Types, BFloat16>) &&
     ...);

/// Finds patterns that no declared parameter matches. Those of listed ones are checked when the
/// model lists them.
template <class Model, class Patterns>
constexpr Finding find_pattern_fault() {
  if constexpr (!TensorListing<Model>) {
    constexpr const auto& table = parameter_table<Model>;
    for (const std::string_view pattern : Patterns::patterns) {
      bool found = false;
      for (std::size_t i = 0; i != table.size() && !found; ++i)
        found = matches(pattern, table.name(i));
      if (!found) return {Fault::pattern_without_match, pattern};
    }
  }
  return {};
}

template <class Model, class Policies>
consteval Finding find_frozen_fault() {
  using Still = Pick<axes::Frozen, Policies>;
  if constexpr (!Still::patterns.empty() && !TensorListing<Model>) {
    constexpr Finding pattern = find_pattern_fault<Model, Still>();
    if constexpr (pattern.fault != Fault::none) return pattern;
    constexpr const auto& table = parameter_table<Model>;
    std::size_t frozen = 0;
    for (std::size_t i = 0; i != table.size(); ++i) frozen += Still::match(table.name(i)) ? 1 : 0;
    if (frozen == table.size()) return {Fault::everything_frozen};
  }
  return {};
}

template <class Model, class Set>
constexpr Finding find_set_fault() {
  if constexpr (requires { Set::patterns; }) {
    return find_pattern_fault<Model, Set>();
  } else {
    return {};
  }
}

/// The numbers of groups as text.
inline constexpr std::string_view group_numbers = "123456789";

template <class Model, class Policies, class... Sets>
consteval Finding find_group_fault(ParameterGroups<Sets...>) {
  using Groups = ParameterGroups<Sets...>;
  using Still = Pick<axes::Frozen, Policies>;
  if constexpr (Groups::count > 1 && !TensorListing<Model>) {
    Finding found;
    const auto note = [&found](Finding finding) {
      if (found.fault == Fault::none) found = finding;
    };
    (note(find_set_fault<Model, Sets>()), ...);
    if (found.fault != Fault::none) return found;
    constexpr const auto& table = parameter_table<Model>;
    bool has_one[Groups::count] = {};
    for (std::size_t i = 0; i != table.size(); ++i) {
      if (!Still::match(table.name(i)))
        has_one[Groups::group_of(table.name(i), table.infos[i].rank)] = true;
    }
    for (std::size_t group = 1; group != Groups::count; ++group) {
      if (!has_one[group])
        return {Fault::group_without_parameters,
                group_numbers.substr(std::min(group, group_numbers.size()) - 1, 1)};
    }
  }
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
    if (!mixes_supported_types<Types> || declared.size != 1 ||
        declared.kinds[0] != ElementKind::f32)
      return {Fault::mixed_of_other_types};
  }
  if (Pick<axes::StepExecution, Policies>::captures) {
    if (on_cpu) return {Fault::captured_on_cpu};
    if (std::is_same_v<typename Pick<axes::UnusedParameters, Policies>::choice, Zero>)
      return {Fault::captured_with_unused};
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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Faults of a model's lists, and of what policies say about its parameters.

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string_view>

#include "lockstep/bucket/layout.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/name.hpp"
#include "lockstep/model/declaration.hpp"
#include "lockstep/model/shapes.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/model/tensor_list.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/trainer/axes.hpp"
#include "lockstep/trainer/messages.hpp"

namespace lockstep::detail {

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

/// The first of several findings that is one.
consteval Finding first_of(std::initializer_list<Finding> findings) {
  for (const Finding& finding : findings) {
    if (finding.fault != Fault::none) return finding;
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
    constexpr Finding set = first_of({Finding{}, find_set_fault<Model, Sets>()...});
    if constexpr (set.fault != Fault::none) return set;
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

/// A sub-graph that no parameter to train is in, among those of the model.
template <class Model, class Still, class Set>
consteval Finding find_subgraph_fault() {
  if constexpr (TensorListing<Model>) {
    return {};
  } else {
    constexpr Finding pattern = find_pattern_fault<Model, Set>();
    if constexpr (pattern.fault != Fault::none) return pattern;
    constexpr const auto& table = parameter_table<Model>;
    for (std::size_t i = 0; i != table.size(); ++i) {
      if (Set::match(table.name(i)) && !Still::match(table.name(i))) return {};
    }
    return {Fault::subgraph_without_parameters, Set::name};
  }
}

template <class Model, class Policies, bool Same, class... Sets>
consteval Finding find_subgraphs_fault(SubgraphList<Same, Sets...>) {
  using List = SubgraphList<Same, Sets...>;
  if (sizeof...(Sets) > (Same ? most_compared_subgraphs : std::size_t{31}))
    return {Fault::too_many_subgraphs};
  for (std::size_t set = 1; set != List::count; ++set) {
    if (List::name_of(set).empty() || List::number_of(List::name_of(set)) != set)
      return {Fault::subgraph_declared_twice, List::name_of(set)};
  }
  return first_of({Finding{}, find_subgraph_fault<Model, Pick<axes::Frozen, Policies>, Sets>()...});
}

template <class Model, class Policies>
consteval Finding find_subgraphs_fault() {
  using Meaning = typename Pick<axes::UnusedParameters, Policies>::choice;
  if constexpr (requires { typename Meaning::list; }) {
    if constexpr (Meaning::list::count == 1) return {Fault::subgraphs_not_declared};
    return find_subgraphs_fault<Model, Policies>(typename Meaning::list{});
  } else {
    return {};
  }
}

/// Finds faults of what policies select among the model's parameters.
template <class Model, class Policies>
consteval Finding find_selection_fault() {
  return first_of({find_frozen_fault<Model, Policies>(),
                   find_group_fault<Model, Policies>(Pick<axes::ParameterGroups, Policies>{}),
                   find_subgraphs_fault<Model, Policies>()});
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The step of a sub-graph: the set that it uses is a constant.

#include <cstddef>
#include <initializer_list>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/name.hpp"

namespace lockstep::detail {

/// Calls `f(std::integral_constant<std::size_t, Set>{})` with a set that is known at run time.
template <std::size_t Count, std::size_t Set = 0, class F>
decltype(auto) with_subgraph(std::size_t set, const F& f) {
  if constexpr (Set + 1 == Count) {
    return f(std::integral_constant<std::size_t, Set>{});
  } else {
    if (set == Set) return f(std::integral_constant<std::size_t, Set>{});
    return with_subgraph<Count, Set + 1>(set, f);
  }
}

/// Evaluations and predictions of a wrapper use a sub-graph while this lives.
template <class Wrapper>
class EvaluatedSubgraph {
 public:
  template <class Set>
  EvaluatedSubgraph(Wrapper& wrapper, const Set& set) : wrapper_(wrapper) {
    wrapper.evaluate_subgraph(subgraph_number<typename Wrapper::subgraphs>(set));
  }
  ~EvaluatedSubgraph() { wrapper_.evaluate_subgraph(whole_model); }
  EvaluatedSubgraph(const EvaluatedSubgraph&) = delete;
  EvaluatedSubgraph& operator=(const EvaluatedSubgraph&) = delete;

 private:
  Wrapper& wrapper_;
};

/// A step that knows its set. Gradients of parameters outside of it stay zero, so that to ask for
/// one, or to say that it is complete, is an error.
template <class Step, class List, std::size_t Set>
class SubgraphStep : public Step {
 public:
  explicit SubgraphStep(const Step& step) : Step(step) {}

  /// The set that this step uses: `step.subgraph() == "with_adapter"_s`.
  static constexpr UsedSubgraph<List, Set> subgraph() { return {}; }

  /// Does this step use a parameter?
  template <class Key>
    requires NameKey<Key>
  static constexpr bool uses(Key key) {
    static_cast<void>(Step::uses(key));  // refuses a name that is not declared
    return List::contains(Set, Key::name);
  }
  template <class Key>
    requires(!NameKey<Key>)
  bool uses(Key key) const {
    const std::string_view name = this->name_of(key);
    return name.empty() || List::contains(Set, name);  // what is not listed is refused elsewhere
  }

  template <class Key>
  constexpr auto grad(Key key) const {
    require_used(key);
    return Step::grad(key);
  }
  template <class Key>
  constexpr void ready(Key key) const {
    require_used(key);
    Step::ready(key);
  }
  template <class Key, class Value = std::initializer_list<double>>
  constexpr void set_grad(Key key, const Value& value) const {
    require_used(key);
    Step::set_grad(key, value);
  }

 private:
  template <class Key>
  constexpr void require_used(Key key) const {
    if (!uses(key)) [[unlikely]]
      refuse(this->name_of(key));
  }
  [[noreturn, gnu::cold, gnu::noinline]] static void refuse(std::string_view parameter) {
    fail("backward",
         {"the gradient of ", parameter, " was written or marked ready, and sub-graph ",
          List::name_of(Set), " does not contain it"},
         "ask step.uses(\"name\"_p) before, or add the parameter to the sub-graph");
  }
};

}  // namespace lockstep::detail

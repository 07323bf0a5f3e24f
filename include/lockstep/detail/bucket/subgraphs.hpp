// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Declared sets of parameters, of which every step uses one.

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct UnusedParameters;
}  // namespace axes

/// A named set of parameters: `Subgraph<"with_adapter", "fc1.*", "adapter.*">`.
template <Name Text, Name... Patterns>
struct Subgraph : detail::NamePatterns<Patterns...> {
  static constexpr bool is_subgraph = true;  // nvcc cannot match partial specialisations on names
  static constexpr std::string_view name = Text.view();
};

/// The first argument of `Subgraphs`: all ranks must use the same set, otherwise all ranks throw.
/// Buckets without a used parameter are not reduced.
struct SameOnAllRanks {};

namespace detail {

template <class Set>
inline constexpr bool is_subgraph = requires { requires Set::is_subgraph; };

template <Name Text>
struct SubgraphKey {
  static constexpr bool is_subgraph_key = true;
  static constexpr std::string_view name = Text.view();
};
template <class Key>
inline constexpr bool is_subgraph_key = requires { requires Key::is_subgraph_key; };

/// The number of the whole model; the declared sets follow from 1.
inline constexpr std::size_t whole_model = 0;

}  // namespace detail

/// Every step uses one of these sets, `job.step<"name"_s>(batch)`, or the whole model. The
/// optimizer skips parameters that no rank used; where another rank did, gradients count as zero.
template <class... Sets>
struct Subgraphs : Choice<axes::UnusedParameters>, WithName<"Subgraphs"> {
  using sets = Subgraphs;  // without `SameOnAllRanks`
  static constexpr bool same_on_all_ranks = false;
  static constexpr std::size_t count = sizeof...(Sets) + 1;
  static constexpr bool well_formed = (detail::is_subgraph<Sets> && ...);

  static constexpr std::string_view name_of(std::size_t set) {
    if constexpr (well_formed) return std::array<std::string_view, count>{"", Sets::name...}[set];
    return "";
  }
  static constexpr bool contains(std::size_t set, [[maybe_unused]] std::string_view parameter) {
    if (set == detail::whole_model) return true;
    std::size_t number = 0;
    bool found = false;
    static_cast<void>(((++number == set && (found = Sets::match(parameter), true)) || ...));
    return found;
  }
  /// The number of a declared set, or `count` if no set has the name.
  static constexpr std::size_t number_of(std::string_view name) {
    std::size_t set = 1;
    while (set != count && name_of(set) != name) ++set;
    return set;
  }
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.number(sizeof...(Sets));
    (Sets::fingerprint_patterns(hash.text(Sets::name)), ...);
  }
};
template <class... Sets>
struct Subgraphs<SameOnAllRanks, Sets...> : Subgraphs<Sets...> {
  static constexpr bool same_on_all_ranks = true;
  static constexpr void fingerprint(detail::Hash& hash) {
    Subgraphs<Sets...>::fingerprint(hash.text("SameOnAllRanks"));
  }
};

namespace detail {

using NoSubgraphs = Subgraphs<>;

template <class Meaning>
inline constexpr bool declares_subgraphs = requires { typename Meaning::sets; };

/// The sets of a choice of `UnusedParameters`.
template <class Meaning>
using SubgraphsIn = std::conditional_t<declares_subgraphs<Meaning>, Meaning, NoSubgraphs>;

}  // namespace detail

/// A sub-graph of a job, or its whole model, chosen at run time: `job.subgraph("name")`.
class SubgraphChoice {
 public:
  constexpr SubgraphChoice() = default;  // the whole model
  constexpr SubgraphChoice(std::size_t number, std::string_view name)
      : number_(number), name_(name) {}

  /// The sets count from 1 in declaration order; 0 is the whole model.
  constexpr std::size_t number() const { return number_; }
  constexpr std::string_view name() const { return name_; }
  friend constexpr bool operator==(const SubgraphChoice& a, const SubgraphChoice& b) {
    return a.number_ == b.number_;
  }

 private:
  std::size_t number_ = detail::whole_model;
  std::string_view name_;
};

namespace detail {

/// The set that a key names: one instantiation, and one error, for each name.
template <class List, class Key>
consteval std::size_t named_subgraph() {
  static_assert(is_subgraph_key<Key>,
                "lockstep: the key of a sub-graph is its name with _s behind it; write "
                "job.step<\"with_adapter\"_s>(batch), and using namespace lockstep");
  static_assert(!is_subgraph_key<Key> || List::count != 1,
                "lockstep: this job declares no sub-graphs; add UnusedParameters<Subgraphs<"
                "Subgraph<\"name\", \"pattern.*\">, ...>>, or step without a name");
  if constexpr (is_subgraph_key<Key> && List::count != 1) {
    constexpr std::size_t found = List::number_of(Key::name);
    static_assert(found != List::count,
                  "lockstep: the job declares no sub-graph of this name; compare the spelling with "
                  "its Subgraphs (the compiler prints the name beside this message)");
    return found % List::count;  // the whole model after an error
  }
  return whole_model;
}

template <class List, class Set>
constexpr std::size_t subgraph_number([[maybe_unused]] const Set& set) {
  if constexpr (std::is_same_v<Set, SubgraphChoice>) {
    return set.number();
  } else {
    return named_subgraph<List, Set>();
  }
}

/// Finds a declared set by a name that is known at run time. Throws if there is none.
template <class List>
SubgraphChoice find_subgraph(std::string_view name) {
  const std::size_t set = List::number_of(name);
  if (set == List::count) {
    std::string declared;
    for (std::size_t s = 1; s != List::count; ++s)
      declared.append(s == 1 ? "" : ", ").append(List::name_of(s));
    fail("subgraph", {"the job declares no sub-graph ", name}, "choose one of: " + declared);
  }
  return {set, List::name_of(set)};
}

/// The set that a step uses, as the model sees it: `step.subgraph() == "with_adapter"_s`.
template <class List, std::size_t Set>
struct UsedSubgraph {
  static constexpr std::string_view name() { return List::name_of(Set); }
  constexpr operator SubgraphChoice() const { return {Set, name()}; }

  /// In a job without sub-graphs no key is equal, so that a model works in both kinds of jobs.
  template <class Key>
    requires is_subgraph_key<Key>
  friend constexpr bool operator==(UsedSubgraph, Key) {
    if constexpr (List::count == 1) {
      return false;
    } else {
      return named_subgraph<List, Key>() == Set;
    }
  }
};

}  // namespace detail

inline namespace literals {

/// `"with_adapter"_s`: the key of a sub-graph.
template <Name Text>
constexpr detail::SubgraphKey<Text> operator""_s() {
  return {};
}

}  // namespace literals

}  // namespace lockstep

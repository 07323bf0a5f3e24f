// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Policies: an axis is a question, a choice is an answer, and a policy such as
/// `Backend<Shm>`, a type that answers one axis of a job, joins the two.

#include "lockstep/core/hash.hpp"
#include "lockstep/core/name.hpp"

namespace lockstep {

/// The name of an axis or of a choice, by which errors and fingerprints know it: `struct Shm :
/// WithName<"Shm">, Choice<axes::Backend> {};`
template <Name Text>
struct WithName {
  static constexpr std::string_view name = Text.view();
};

/// A choice names the axes it answers, mostly one, so that `Backend<AdamW>` can be told from
/// `Backend<Shm>`.
template <class... Axes>
struct Choice {
  template <class Axis>
  static constexpr bool answers = (std::same_as<Axis, Axes> || ...);
};

namespace detail {

/// C is one of the answers to Axis.
template <class C, class Axis>
concept ChoiceOf = requires {
  { C::name } -> std::convertible_to<std::string_view>;
} && C::template answers<Axis>;

/// Adds a choice to a fingerprint: its name and, where it has some, its numbers.
template <class C>
constexpr Hash& add_choice(Hash& hash) {
  hash.text(C::name);
  if constexpr (requires { C::fingerprint(hash); }) C::fingerprint(hash);
  return hash;
}

/// The base of every policy whose behaviour is one choice. It accepts any type: a wrong one is
/// reported with all other composition errors, in one place, as a sentence.
template <class Axis, class C>
struct ChoicePolicy {
  using axis = Axis;
  using choice = C;
  static constexpr bool well_formed = [] {
    if constexpr (ChoiceOf<C, Axis> && requires { C::well_formed; }) return C::well_formed;
    return ChoiceOf<C, Axis>;
  }();
  static constexpr void fingerprint(Hash& hash) { add_choice<C>(hash.text(Axis::name)); }
};

/// The base of every policy that is a number, or a few, checked by its own rule.
template <class Axis>
struct ValuePolicy {
  using axis = Axis;
  static constexpr bool well_formed = true;
};

/// A policy names its axis, says whether its arguments make sense, and adds itself to a job's
/// fingerprint. Policies are never constructed.
template <class P>
concept Policy = requires(Hash& hash) {
  typename P::axis;
  { P::axis::name } -> std::convertible_to<std::string_view>;
  { P::well_formed } -> std::convertible_to<bool>;
  P::fingerprint(hash);
};

/// A choice given instead of a policy: `Shm` instead of `Backend<Shm>`.
template <class C>
concept BareChoice = requires { C::template answers<C>; } && !requires { typename C::axis; };

/// P answers Axis.
template <class P, class Axis>
concept PolicyOf = requires { typename P::axis; } && std::same_as<typename P::axis, Axis>;

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Policies: a policy such as `Backend<Shm>` gives a job's axis (`Backend`) a choice (`Shm`).

#include "lockstep/detail/core/name.hpp"

namespace lockstep {

/// The name of an axis or a choice in errors and fingerprints:
/// `struct Shm : WithName<"Shm">, Choice<axes::Backend> {};`
template <Name Text>
struct WithName {
  static constexpr std::string_view name = Text.view();
};

/// A choice names its axes, mostly one, so that `Backend<AdamW>` can be told from `Backend<Shm>`.
template <class... Axes>
struct Choice {
  template <class Axis>
  static constexpr bool answers = (std::same_as<Axis, Axes> || ...);
};

namespace detail {

template <class C, class Axis>
concept ChoiceOf = requires {
  { C::name } -> std::convertible_to<std::string_view>;
} && C::template answers<Axis>;

/// Adds a choice to a fingerprint: its name and, if it has any, its values.
template <class C>
constexpr Hash& add_choice(Hash& hash) {
  hash.text(C::name);
  if constexpr (requires { C::fingerprint(hash); }) C::fingerprint(hash);
  return hash;
}

/// The base of policies of one choice. A wrong type is reported with all other composition errors.
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

/// The base of policies of numbers, checked by their own rules.
template <class Axis>
struct ValuePolicy {
  using axis = Axis;
  static constexpr bool well_formed = true;
};

/// A type, never constructed, that names its axis, validates its arguments and has a fingerprint.
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

template <class P, class Axis>
concept PolicyOf = requires { typename P::axis; } && std::same_as<typename P::axis, Axis>;

}  // namespace detail

}  // namespace lockstep

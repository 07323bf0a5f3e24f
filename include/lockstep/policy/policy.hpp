// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The policy concept: a type that answers one axis of a job.

#include <concepts>
#include <string_view>

#include "lockstep/core/hash.hpp"

namespace lockstep::detail {

/// A policy names its axis, says whether its arguments make sense and whether it is built, and adds
/// itself to a job's fingerprint. Policies are never constructed.
template <class P>
concept Policy = requires(Hash& hash) {
  typename P::axis;
  { P::axis::name } -> std::convertible_to<std::string_view>;
  { P::well_formed } -> std::convertible_to<bool>;
  { P::built() } -> std::convertible_to<bool>;
  P::fingerprint(hash);
};

/// A choice given instead of a policy: `Shm` instead of `Backend<Shm>`.
template <class C>
concept BareChoice = requires { C::template answers<C>; } && !requires { typename C::axis; };

/// P answers Axis.
template <class P, class Axis>
concept PolicyOf = requires { typename P::axis; } && std::same_as<typename P::axis, Axis>;

}  // namespace lockstep::detail

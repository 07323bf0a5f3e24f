// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Order-free packs of policies, their one canonical order, and the fingerprint of a job: 64
/// bits over everything two ranks must agree on before they exchange a gradient.

#include "lockstep/core/hash.hpp"
#include "lockstep/policy/policy.hpp"
#include "lockstep/version.hpp"

namespace lockstep {

/// A list of policies.
template <class... Ps>
struct PolicyPack {
  using pack = PolicyPack;
};

namespace detail {

/// How many policies of the pack answer Axis.
template <class Axis, class... Ps>
inline constexpr std::size_t policies_for = (std::size_t{PolicyOf<Ps, Axis>} + ... + 0);

/// The first policy for Default's axis, else Default.
template <class Default, class... Ps>
struct FirstFor : std::type_identity<Default> {};
template <class Default, class P, class... Ps>
struct FirstFor<Default, P, Ps...>
    : std::conditional_t<PolicyOf<P, typename Default::axis>, std::type_identity<P>,
                         FirstFor<Default, Ps...>> {};

/// All policies of a pack, of which no two answer the same axis, as bases: the compiler finds the
/// one for an axis as it finds a base, faster than any search of ours.
template <class Axis, class P>
struct Answer : std::type_identity<P> {};
template <class Pack>
struct Answers;
template <class... Ps>
struct Answers<PolicyPack<Ps...>> : Answer<typename Ps::axis, Ps>... {};
/// Only declared: its type is all that is wanted of it.
template <class Axis, class P>
Answer<Axis, P> answer_for(const Answer<Axis, P>&);

/// A type may have its policies as its `pack`.
template <class Axis, class Policies>
struct PickFrom {
  using type = typename decltype(answer_for<Axis>(
      std::declval<const Answers<typename Policies::pack>&>()))::type;
};

/// The policy for Axis in a pack that has one.
template <class Axis, class Pack>
using Pick = typename PickFrom<Axis, Pack>::type;

/// The policy given for Default's axis, else Default.
template <class Default, class... Ps>
using PickOr = typename FirstFor<Default, Ps...>::type;

// Only declared: their types are all that is wanted of them.
template <class... Defaults, class... Ps>
PolicyPack<PickOr<Defaults, Ps...>...> canonical(PolicyPack<Defaults...>, PolicyPack<Ps...>);
template <class... As, class... Bs>
PolicyPack<As..., Bs...> operator+(PolicyPack<As...>, PolicyPack<Bs...>);
template <class... Defaults, class... Ps>
auto not_defaults(PolicyPack<Defaults...>, PolicyPack<Ps...>)
    -> decltype((PolicyPack<>{} + ... +
                 std::conditional_t<std::is_same_v<Defaults, Ps>, PolicyPack<>, PolicyPack<Ps>>{}));
template <template <class...> class To, class... Ps>
To<Ps...> spelled(PolicyPack<Ps...>);

/// One policy per axis, in the order of `Defaults`: the list of all axes and their order in one.
/// Any order of the same policies gives the same type.
template <class Defaults, class... Ps>
using Canonical = decltype(canonical(Defaults{}, PolicyPack<Ps...>{}));

/// `To<...>` of those policies of a canonical pack that are not the default of their axis.
template <template <class...> class To, class Defaults, class Pack>
using ChosenFrom = decltype(spelled<To>(not_defaults(Defaults{}, Pack{})));

/// Is Axis one of those that a pack answers?
template <class Axis, class... Ps>
constexpr bool answers(PolicyPack<Ps...>) {
  return policies_for<Axis, Ps...> != 0;
}

/// Adds every policy of a canonical pack to a fingerprint.
template <class... Ps>
constexpr void fingerprint(Hash& hash, PolicyPack<Ps...>) {
  (Ps::fingerprint(hash), ...);
}

/// Adds names, element types and extents, in order. `tensors` is a layout: it has `infos()`, every
/// extent known, and `name(tensor)`.
constexpr void fingerprint(Hash& hash, const auto& tensors) {
  hash.number(tensors.infos().size());
  std::size_t tensor = 0;
  for (const auto& info : tensors.infos()) {
    hash.text(tensors.name(tensor++)).number(static_cast<std::uint64_t>(info.element));
    hash.number(info.rank);
    for (std::size_t j = 0; j != info.rank; ++j) hash.number(info.extents[j]);
    if (info.is_frozen) hash.text("frozen");
  }
}

/// The fingerprint of a model's tensors under canonical policies.
template <class Policies>
constexpr std::uint64_t fingerprint_of(const auto& parameters, const auto& buffers) {
  Hash hash;
  hash.text(version);
  fingerprint(hash, parameters);
  fingerprint(hash, buffers);
  fingerprint(hash, typename Policies::pack{});
  return hash.value();
}

}  // namespace detail

}  // namespace lockstep

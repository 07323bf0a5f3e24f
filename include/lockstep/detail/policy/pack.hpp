// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Order-free packs of policies, their canonical order, and the fingerprint of a job.

#include "lockstep/detail/policy/policy.hpp"
#include "lockstep/version.hpp"

namespace lockstep {

/// A list of policies.
template <class... Ps>
struct PolicyPack {
  using pack = PolicyPack;
};

namespace detail {

template <class Axis, class... Ps>
inline constexpr std::size_t policies_for = (std::size_t{PolicyOf<Ps, Axis>} + ... + 0);

/// The first policy for Default's axis, else Default.
template <class Default, class... Ps>
struct FirstFor : std::type_identity<Default> {};
template <class Default, class P, class... Ps>
struct FirstFor<Default, P, Ps...>
    : std::conditional_t<PolicyOf<P, typename Default::axis>, std::type_identity<P>,
                         FirstFor<Default, Ps...>> {};

/// The policies of a pack as bases: the compiler finds a base faster than templates search.
template <class Axis, class P>
struct Answer : std::type_identity<P> {};
template <class Pack>
struct Answers;
template <class... Ps>
struct Answers<PolicyPack<Ps...>> : Answer<typename Ps::axis, Ps>... {};
/// Declared only, for its type.
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

template <class Default, class... Ps>
using PickOr = typename FirstFor<Default, Ps...>::type;

// Declared only, for their types.
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

/// One policy per axis, in the order of `Defaults`: one type for any order of the same policies.
template <class Defaults, class... Ps>
using Canonical = decltype(canonical(Defaults{}, PolicyPack<Ps...>{}));

/// `To<...>` of the policies in a canonical pack that are not their axis's default.
template <template <class...> class To, class Defaults, class Pack>
using ChosenFrom = decltype(spelled<To>(not_defaults(Defaults{}, Pack{})));

template <class Axis, class... Ps>
constexpr bool answers(PolicyPack<Ps...>) {
  return policies_for<Axis, Ps...> != 0;
}

template <class... Ps>
constexpr void fingerprint(Hash& hash, PolicyPack<Ps...>) {
  (Ps::fingerprint(hash), ...);
}

/// Adds names, element types and extents, in order. `tensors`: a layout with known extents.
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

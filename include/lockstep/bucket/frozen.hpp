// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The axis of frozen parameters: those that are used and never trained.

#include <cstddef>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/buckets.hpp"
#include "lockstep/core/name.hpp"
#include "lockstep/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Frozen : WithName<"Frozen"> {};
}  // namespace axes

/// The policy that says which parameters stay as they are: `Frozen<"embed.*", "head.bias">`, where
/// `*` stands for any characters. A frozen parameter has initial values like any other and all
/// ranks get rank 0's, but it has no gradient, lies in no bucket and has no state of the optimizer.
template <Name... Patterns>
struct Frozen : detail::ValuePolicy<axes::Frozen>, detail::NamePatterns<Patterns...> {
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Frozen::name);
    detail::NamePatterns<Patterns...>::fingerprint_patterns(hash);
  }
};

namespace detail {

/// A bucket policy that knows which parameters lie in no bucket.
template <class Limits, class Still>
struct FreezingLimits {
  static constexpr BucketLimits limits = Limits::limits;
  using frozen = Still;
};

/// Rules that leave room behind every bucket.
template <class Rules, std::size_t Bytes>
struct RoomBehind : Rules {
  static constexpr std::size_t room = Bytes;
};

/// By what parameters are laid out, with `Room` bytes behind every bucket. Without frozen ones and
/// without room it is the bucket policy itself.
template <class Limits, class Still, std::size_t Room = 0>
using PlanRules = std::conditional_t<
    Room == 0, std::conditional_t<Still::patterns.empty(), Limits, FreezingLimits<Limits, Still>>,
    RoomBehind<std::conditional_t<Still::patterns.empty(), Limits, FreezingLimits<Limits, Still>>,
               Room>>;

/// The bytes that rules leave behind every bucket.
template <class Rules>
constexpr std::size_t room_behind_buckets() {
  if constexpr (requires { Rules::room; }) {
    return Rules::room;
  } else {
    return 0;
  }
}

/// Do these rules freeze a parameter?
template <class Rules>
inline constexpr bool freezes_some = requires { typename Rules::frozen; };

template <class Rules>
constexpr bool is_frozen_name([[maybe_unused]] std::string_view name) {
  if constexpr (freezes_some<Rules>) {
    return Rules::frozen::match(name);
  } else {
    return false;
  }
}

}  // namespace detail

}  // namespace lockstep

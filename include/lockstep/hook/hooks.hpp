// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The hooks axis: changes to gradients on their way through a reduction, and the filter of
/// updates.

#include <cstddef>
#include <string_view>
#include <type_traits>

#include "lockstep/hook/hook.hpp"
#include "lockstep/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Hooks : WithName<"Hooks"> {};
}  // namespace axes

/// An element of `Hooks<...>`: a parameter whose gradient, averaged over ranks, is zero in every
/// element keeps its value and its states, without decay or momentum, as one that has no gradient
/// in PyTorch. Its count of updates does not advance.
///
/// It is no stage of the reduction: gradients travel as they do without it.
struct SkipZeroGradients : WithName<"SkipZeroGradients"> {};

namespace detail {

/// Is an element of `Hooks<...>` a filter of updates? The others are stages of a reduction.
template <class Hook>
inline constexpr bool filters_updates = std::is_same_v<Hook, SkipZeroGradients>;

/// A hook that is no more: whoever gives one to `Hooks` gets this sentence.
template <class... Asked>
struct RemovedHook {
  static_assert(sizeof...(Asked) == 0,
                "lockstep: the hooks TopK and NoReduction were removed; use PowerSGD to send less");
  static constexpr std::string_view name = "a removed hook";
  template <class T>
  struct Bucket {};
};
}  // namespace detail

/// Removed: naming it in `Hooks` says what to use instead.
template <auto...>
using TopK = detail::RemovedHook<void>;
/// Removed, likewise.
using NoReduction = detail::RemovedHook<void>;

/// Gradient hooks, applied from left to right: compression, quantisation, a user's own. The first
/// is given a bucket's gradients; what it hands on is given to the next, and what the last one
/// hands on is averaged over ranks.
template <class... Given>
struct Hooks : detail::ValuePolicy<axes::Hooks> {
  /// Those that take part in a reduction, in their order.
  using stages = detail::StagesAmong<Given...>;

  static constexpr bool well_formed =
      ((detail::filters_updates<Given> || detail::GradientHook<Given>) && ...);
  /// Do gradients travel in another way than without hooks?
  static constexpr bool has_stages = stages::size != 0;
  /// Are parameters left alone whose averaged gradient is zero?
  static constexpr bool skips_zero_gradients = (detail::filters_updates<Given> || ...);
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Hooks::name);
    (detail::add_hook<Given>(hash), ...);
  }
};

}  // namespace lockstep

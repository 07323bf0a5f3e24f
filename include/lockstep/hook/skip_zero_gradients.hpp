// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The filter of updates: parameters whose averaged gradient is zero are left alone.

#include <string_view>
#include <type_traits>

namespace lockstep {

/// An element of `Hooks<...>`: a parameter whose gradient, averaged over ranks, is zero in every
/// element keeps its value and its states, without decay or momentum, as one that has no gradient
/// in PyTorch. Its count of updates does not advance.
///
/// It is no stage of the reduction: gradients travel as they do without it.
struct SkipZeroGradients {
  static constexpr std::string_view name = "SkipZeroGradients";
};

namespace detail {

/// Is an element of `Hooks<...>` a filter of updates? The others are stages of a reduction.
template <class Hook>
inline constexpr bool filters_updates = std::is_same_v<Hook, SkipZeroGradients>;

}  // namespace detail

}  // namespace lockstep

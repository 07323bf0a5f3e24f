// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A loop whose index is a constant, and an index that becomes one.

#include <cstddef>
#include <type_traits>
#include <utility>

namespace lockstep::detail {

/// Calls `f(std::integral_constant<std::size_t, I>{})` for every I from `First` on, `Count` times.
/// Halves of halves, because compilers do not survive an expression nested ten thousand deep.
template <std::size_t Count, std::size_t First = 0, class F>
constexpr void for_each_index(F&& f) {
  if constexpr (Count > 32) {
    for_each_index<Count / 2, First>(f);
    for_each_index<Count - Count / 2, First + Count / 2>(f);
  } else {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (f(std::integral_constant<std::size_t, First + I>{}), ...);
    }(std::make_index_sequence<Count>{});
  }
}

/// Calls `f(std::integral_constant<std::size_t, I>{})` for I = `index`, one of `Count` from `First`
/// on. It is found by halves.
template <std::size_t Count, std::size_t First = 0, class F>
constexpr void with_index(std::size_t index, F&& f) {
  if constexpr (Count == 1) {
    f(std::integral_constant<std::size_t, First>{});
  } else if (index < First + Count / 2) {
    with_index<Count / 2, First>(index, f);
  } else {
    with_index<Count - Count / 2, First + Count / 2>(index, f);
  }
}

}  // namespace lockstep::detail

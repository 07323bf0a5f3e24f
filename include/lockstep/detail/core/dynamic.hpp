// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `dynamic`, a size known at run time only, and functions with constants as indices.

#include "lockstep/detail/core/standard.hpp"

namespace lockstep {

/// A size known at construction, `std::dynamic_extent`: `World<dynamic>`, `Grid<dynamic, 4>`.
inline constexpr std::size_t dynamic = static_cast<std::size_t>(-1);

/// A size that takes no storage when it is a constant.
template <std::size_t N>
struct Size {
  constexpr Size() = default;
  LOCKSTEP_HOST_DEVICE static constexpr std::size_t value() { return N; }
};

template <>
struct Size<dynamic> {
  constexpr explicit Size(std::size_t size) : size_(size) {}
  LOCKSTEP_HOST_DEVICE constexpr std::size_t value() const { return size_; }

 private:
  std::size_t size_;
};

namespace detail {

/// Calls `f(std::integral_constant<std::size_t, I>{})` for `Count` values of I from `First` on. The
/// recursion by halves keeps expressions shallow: compilers fail at a nesting of ten thousand.
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

/// Calls `f(std::integral_constant<std::size_t, I>{})` for I = `index`, found by bisection.
template <std::size_t Count, std::size_t First = 0, class F>
constexpr decltype(auto) with_index(std::size_t index, F&& f) {
  if constexpr (Count == 1) {
    return f(std::integral_constant<std::size_t, First>{});
  } else if (index < First + Count / 2) {
    return with_index<Count / 2, First>(index, f);
  } else {
    return with_index<Count - Count / 2, First + Count / 2>(index, f);
  }
}

/// An array of `Count` values, or a vector if `Count` is `dynamic`.
template <class T, std::size_t Count>
using Table = std::conditional_t<Count == dynamic, std::vector<T>,
                                 std::array<T, Count == dynamic ? 0 : Count>>;

/// A table of `size` zeroed values; `size` equals a static `Count`.
template <class T, std::size_t Count>
constexpr Table<T, Count> make_table(std::size_t size) {
  if constexpr (Count == dynamic) {
    return Table<T, Count>(size);
  } else {
    return {};
  }
}

template <std::size_t N>
constexpr Size<N> make_size(std::size_t size) {
  if constexpr (N == dynamic) {
    return Size<N>(size);
  } else {
    return {};
  }
}

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Anything contiguous as a span of its elements, for the arguments of collectives.

#include <concepts>
#include <iterator>
#include <span>
#include <type_traits>
#include <utility>

#include "lockstep/core/element.hpp"

namespace lockstep {

namespace detail {

/// An mdspan over plain memory, the host's or a GPU's, that has no gaps.
template <class V>
concept DenseView = requires(const V& view) {
  { view.data_handle() } -> std::convertible_to<typename V::element_type*>;
  { view.is_exhaustive() } -> std::convertible_to<bool>;
};

}  // namespace detail

/// The elements of a view, a vector, an array or a span, in memory order.
template <detail::DenseView V>
constexpr auto flat(const V& view) {
  return std::span<typename V::element_type>(view.data_handle(), view.size());
}
template <class R>
  requires(!detail::DenseView<std::remove_cvref_t<R>>)
constexpr auto flat(R&& range) {
  return std::span<std::remove_reference_t<decltype(*std::data(range))>>(range);
}

namespace detail {

template <class S>
using FlatElement = typename decltype(flat(std::declval<S&>()))::element_type;

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Anything contiguous as a span of its elements, for the arguments of collectives: views,
/// spans, vectors, arrays, and Thrust's vectors, of which no header is needed here.

#include <concepts>
#include <cstddef>
#include <iterator>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/element.hpp"

namespace lockstep {

namespace detail {

/// An mdspan over plain memory, the host's or a GPU's, that has no gaps.
template <class V>
concept DenseView = requires(const V& view) {
  { view.data_handle() } -> std::convertible_to<typename V::element_type*>;
  { view.is_exhaustive() } -> std::convertible_to<bool>;
};

/// A pointer as it is, or the one inside of a class that stands for a pointer: Thrust's
/// `device_ptr` and `universal_ptr` have it as `get()`.
template <class T>
constexpr T* raw_pointer(T* pointer) {
  return pointer;
}
template <class P>
  requires requires(const P& pointer) { raw_pointer(pointer.get()); }
constexpr auto* raw_pointer(const P& pointer) {
  return pointer.get();
}

/// A range whose elements lie one behind the other, in memory that the host need not be able to
/// read.
template <class R>
concept ContiguousMemory = requires(R& range) {
  raw_pointer(std::data(range));
  { std::size(range) } -> std::convertible_to<std::size_t>;
};

/// `std::vector<bool>` has no elements that a span could show.
template <class R>
inline constexpr bool packs_bits = false;
template <class Allocator>
inline constexpr bool packs_bits<std::vector<bool, Allocator>> = true;

}  // namespace detail

/// The elements of a view, a vector (the standard library's or Thrust's), an array or a span, in
/// memory order.
template <detail::DenseView V>
constexpr auto flat(const V& view) {
  return std::span<typename V::element_type>(view.data_handle(), view.size());
}
template <class R>
  requires(!detail::DenseView<std::remove_cvref_t<R>>)
constexpr auto flat(R&& range) {
  constexpr bool packed = detail::packs_bits<std::remove_cvref_t<R>>;
  static_assert(!packed,
                "lockstep: std::vector<bool> packs its elements into bits; give an array of bool, "
                "or a std::vector<std::uint8_t>");
  if constexpr (packed) {
    return std::span<bool>();
  } else {
    return std::span(detail::raw_pointer(std::data(range)), std::size(range));
  }
}

namespace detail {

template <class S>
using FlatElement = typename decltype(flat(std::declval<S&>()))::element_type;

}  // namespace detail

}  // namespace lockstep

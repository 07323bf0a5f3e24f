// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The arguments of collectives, as the elements that travel.

#include <concepts>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "lockstep/core/element.hpp"
#include "lockstep/core/flat.hpp"
#include "lockstep/core/reduce_op.hpp"

namespace lockstep::detail {

/// One number, in place of memory that holds several.
template <class T>
concept SingleElement = Element<T> || std::same_as<T, bool>;

/// Elements as they travel: a bool is a byte that is 0 or 1.
template <class T>
auto travelling(std::span<T> values) {
  if constexpr (std::same_as<std::remove_const_t<T>, bool>) {
    static_assert(sizeof(bool) == 1);
    using Byte = std::conditional_t<std::is_const_v<T>, const std::uint8_t, std::uint8_t>;
    return std::span<Byte>(reinterpret_cast<Byte*>(values.data()), values.size());
  } else {
    return values;
  }
}

/// Is this memory of elements that collectives move? Of packed bits, `flat` says why it is not.
template <class Data>
consteval bool holds_elements() {
  using Plain = std::remove_cvref_t<Data>;
  if constexpr (packs_bits<Plain>) {
    return true;
  } else if constexpr (DenseView<Plain> || requires(Plain& data) { std::span(data); }) {
    return SingleElement<std::remove_const_t<FlatElement<Data>>>;
  } else {
    return false;
  }
}

/// The elements of an argument, as they travel. An argument that has none is one error: what
/// follows sees a span of floats.
template <class Data>
auto elements_of(Data&& data) {
  constexpr bool fits = holds_elements<Data>();
  static_assert(fits,
                "lockstep: a collective takes memory of numbers or bools (a span, vector, array or "
                "view); their types are double, float, Half, BFloat16, integers and bool");
  if constexpr (fits) {
    return travelling(flat(data));
  } else {
    return std::span<float>();
  }
}
template <class Data>
using ElementsOf = typename decltype(elements_of(std::declval<Data&>()))::element_type;

/// The operations of bool: those whose result is 0 or 1 again.
template <class Op>
inline constexpr bool is_logical =
    std::same_as<Op, Min> || std::same_as<Op, Max> || std::same_as<Op, BitAnd> ||
    std::same_as<Op, BitOr> || std::same_as<Op, BitXor>;

/// The element type that both arguments of a collective have. Not a member of the front: nvcc
/// writes this type's name into code outside of it.
template <class In, class Out>
struct CommonElement {
  using type = ElementsOf<Out>;
  static_assert(std::same_as<std::remove_const_t<ElementsOf<const In>>, type>,
                "lockstep: a collective's arguments have one element type");
};

}  // namespace lockstep::detail

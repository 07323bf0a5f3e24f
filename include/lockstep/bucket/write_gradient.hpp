// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Writes a whole gradient at once: from a number, a range of numbers or a view.

#include <cstddef>
#include <iterator>
#include <span>
#include <string>
#include <type_traits>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/view.hpp"

namespace lockstep::detail {

/// Text is no range of numbers.
template <class V>
inline constexpr bool is_number =
    (std::is_arithmetic_v<V> || Element<V>) && !std::is_same_v<V, char>;

/// A range that knows its size.
template <class V>
concept NumberRange = requires(const V& values) {
  std::begin(values) != std::end(values);
  requires is_number<std::remove_cvref_t<decltype(*std::begin(values))>>;
  std::size(values);
};

template <class V>
inline constexpr bool is_view = false;
template <class Memory, class T, std::size_t... E>
inline constexpr bool is_view<View<Memory, T, E...>> = true;

/// How many numbers a type holds: `dynamic` where the compiler does not know it.
template <class V>
inline constexpr std::size_t number_count = dynamic;
template <class Memory, class T, std::size_t... E>
inline constexpr std::size_t number_count<View<Memory, T, E...>> =
    ((E == dynamic) || ...) ? dynamic : (std::size_t{1} * ... * E);
template <class T, std::size_t N>
inline constexpr std::size_t number_count<T[N]> = N;
template <class T, std::size_t N>
inline constexpr std::size_t number_count<std::span<T, N>> = N;
template <template <class, std::size_t> class Array, class T, std::size_t N>
inline constexpr std::size_t number_count<Array<T, N>> = N;  // std::array, without its header

/// A number in the type of a gradient's elements, rounded once.
template <class T, class V>
constexpr T converted(const V& number) {
  if constexpr (FloatingElement<V>) {
    return static_cast<T>(static_cast<Accumulator<T>>(static_cast<Accumulator<V>>(number)));
  } else {
    return static_cast<T>(static_cast<Accumulator<T>>(number));
  }
}

template <class Key>
[[noreturn, gnu::cold, gnu::noinline]] void refuse_gradient(Key key, std::size_t elements,
                                                            std::size_t given) {
  std::string name;
  if constexpr (requires { Key::name; }) {
    name = Key::name;
  } else if constexpr (requires { key.index; }) {
    name = "parameter " + std::to_string(key.index);
  } else {
    name = "parameter " + std::to_string(key);
  }
  throw Error("set_grad",
              "the gradient of " + name + " has " + std::to_string(elements) +
                  " elements, and was given " + std::to_string(given),
              "give it a number for every element, in the order of rows");
}

/// Have two views the same extents? A view of one axis stands for its elements in order.
template <class Gradient, class Values>
constexpr bool has_shape_of(const Gradient& gradient, const Values& values) {
  if constexpr (Values::rank() == 1 || Gradient::rank() == 1) {
    return values.size() == gradient.size();
  } else {
    static_assert(Values::rank() == Gradient::rank(),
                  "lockstep: set_grad was given a view of another rank than the parameter has");
    bool same = true;
    for (std::size_t axis = 0; axis != Gradient::rank(); ++axis)
      same = same && values.extent(axis) == gradient.extent(axis);
    return same;
  }
}

/// Says in words what a host's gradient cannot be written from. Returns whether it can.
template <class Gradient, class Value>
consteval bool require_gradient_value() {
  constexpr bool number = is_number<Value>;
  constexpr bool view = is_view<Value>;
  constexpr bool known = number || view || NumberRange<Value>;
  static_assert(known,
                "lockstep: set_grad takes a number for a scalar parameter, and a vector, span, "
                "array or view of numbers for a tensor");
  constexpr std::size_t wanted = number_count<Gradient>;
  constexpr std::size_t given = number ? 1 : number_count<Value>;
  constexpr bool fits = wanted == dynamic || given == dynamic || wanted == given;
  static_assert(!known || fits,
                "lockstep: set_grad was given another number of elements than the parameter has; "
                "give it one number for every element");
  return known && fits;
}

/// Writes all elements of a gradient in host memory.
template <class Gradient, class Key, class Value>
constexpr void write_gradient(const Gradient& gradient, Key key, const Value& value) {
  using T = typename Gradient::value_type;
  if constexpr (require_gradient_value<Gradient, Value>()) {
    T* const to = gradient.data_handle();
    if constexpr (is_number<Value>) {
      if (gradient.size() != 1) refuse_gradient(key, gradient.size(), 1);
      *to = converted<T>(value);
    } else if constexpr (is_view<Value>) {
      static_assert(std::is_same_v<typename Value::memory, HostMemory>,
                    "lockstep: set_grad of a CPU job was given a view of device memory; copy it to "
                    "the host first");
      if (!has_shape_of(gradient, value)) refuse_gradient(key, gradient.size(), value.size());
      for (std::size_t i = 0; i != gradient.size(); ++i)
        to[i] = converted<T>(value.data_handle()[i]);
    } else {
      if (std::size(value) != gradient.size())
        refuse_gradient(key, gradient.size(), std::size(value));
      std::size_t i = 0;
      for (const auto& number : value) to[i++] = converted<T>(number);
    }
  }
}

}  // namespace lockstep::detail

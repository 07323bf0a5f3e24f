// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How a model declares its tensors: `Parameter`, `Buffer`, lists of them, `Scope` and
/// `Repeat`.

#include <array>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <string_view>

#include "lockstep/core/element.hpp"
#include "lockstep/core/name.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/model/tensor_sink.hpp"

namespace lockstep {

namespace detail {

/// An entry of a list: one tensor, or a scope with tensors inside. It knows how many tensors it
/// holds and how long their joined names are, and writes both into a `TensorSink`.
template <class D>
concept Declaration = requires(TensorSink& sink, const NamePrefix* outer) {
  { D::role } -> std::convertible_to<TensorRole>;
  { D::tensors } -> std::convertible_to<std::size_t>;
  { D::characters } -> std::convertible_to<std::size_t>;
  { D::well_formed } -> std::convertible_to<bool>;
  D::declare(sink, outer);
};

template <TensorRole Role, Name Text, class T, std::size_t... E>
struct TensorDeclaration {
  static constexpr TensorRole role = Role;
  static constexpr std::size_t tensors = 1;
  static constexpr std::size_t characters = Text.view().size();
  static constexpr bool well_formed = sizeof...(E) <= max_tensor_rank;

  static constexpr void declare(TensorSink& sink, const NamePrefix* outer) {
    sink.append(outer, Text.view(), {element_kind<T>(), sizeof...(E), {E...}});
  }
};

constexpr bool all_of(std::initializer_list<bool> each) {
  for (const bool one : each) {
    if (!one) return false;
  }
  return true;
}

template <TensorRole Role, class... Entries>
struct DeclarationList {
  static constexpr TensorRole role = Role;

  // Arrays and loops, not folds: an expression nested a thousand deep is slow to compile, one
  // nested ten thousand deep never ends.

  /// Are all entries declarations of the list's role? Otherwise the other members mean nothing.
  static constexpr bool well_formed = [] {
    if constexpr (all_of({Declaration<Entries>...})) {
      return all_of({(Entries::role == Role && Entries::well_formed)...});
    } else {
      return false;
    }
  }();

  static constexpr std::size_t tensors = [] {
    std::size_t sum = 0;
    for (std::size_t n : {std::size_t{0}, Entries::tensors...}) sum += n;
    return sum;
  }();
  static constexpr std::size_t characters = [] {
    std::size_t sum = 0;
    for (std::size_t n : {std::size_t{0}, Entries::characters...}) sum += n;
    return sum;
  }();

  static constexpr void declare(TensorSink& sink, const NamePrefix* outer) {
    using Declare = void (*)(TensorSink&, const NamePrefix*);
    const std::array<Declare, sizeof...(Entries)> entries{&Entries::declare...};
    for (const Declare entry : entries) entry(sink, outer);
  }
};

/// The base of scopes. A scope around anything but declarations is ill-formed, which the
/// composition check reports. (A partial specialisation of the scope itself is beyond nvcc, because
/// of its name.)
template <class List>
struct Scoped {
  static constexpr TensorRole role = TensorRole::parameter;
  static constexpr bool well_formed = false;
  static constexpr std::size_t inner_tensors = 0;
  static constexpr std::size_t inner_characters = 0;
};
template <Declaration List>
struct Scoped<List> {
  static constexpr TensorRole role = List::role;
  static constexpr bool well_formed = List::well_formed;
  static constexpr std::size_t inner_tensors = List::tensors;
  static constexpr std::size_t inner_characters = List::characters;
};

}  // namespace detail

/// A trained tensor: `Parameter<"fc1.weight", float, 128, 784>`, row-major. Without extents, a
/// scalar; with `dynamic` extents, shaped by the model at construction.
template <Name Text, class T, std::size_t... E>
struct Parameter : detail::TensorDeclaration<detail::TensorRole::parameter, Text, T, E...> {};

/// A tensor that is part of the model's state but not trained, such as a running mean.
template <Name Text, class T, std::size_t... E>
struct Buffer : detail::TensorDeclaration<detail::TensorRole::buffer, Text, T, E...> {};

/// A model's parameters, in forward order: gradients are expected in reverse.
template <class... Entries>
struct ParameterList : detail::DeclarationList<detail::TensorRole::parameter, Entries...> {};

/// A model's buffers.
template <class... Entries>
struct BufferList : detail::DeclarationList<detail::TensorRole::buffer, Entries...> {};

/// A list under a name: `Scope<"head", L>` turns `weight` into `head.weight`.
template <Name Text, class List>
struct Scope : detail::Scoped<List> {
  using Inner = detail::Scoped<List>;
  static constexpr std::size_t tensors = Inner::inner_tensors;
  static constexpr std::size_t characters =
      Inner::inner_characters + tensors * (Text.view().size() + 1);

  static constexpr void declare(detail::TensorSink& sink, const detail::NamePrefix* outer) {
    const detail::NamePrefix prefix{outer, Text.view()};
    List::declare(sink, &prefix);
  }
};

/// A list several times over: `Repeat<"blocks", 12, L>` holds `blocks.0.weight` to
/// `blocks.11.weight`.
template <Name Text, std::size_t Times, class List>
struct Repeat : detail::Scoped<List> {
  using Inner = detail::Scoped<List>;
  static constexpr std::size_t tensors = Times * Inner::inner_tensors;
  static constexpr std::size_t characters = [] {
    std::size_t sum = 0;
    for (std::size_t i = 0; i != Times; ++i) {
      const std::size_t prefix = Text.view().size() + detail::decimal_digits(i) + 2;
      sum += Inner::inner_characters + Inner::inner_tensors * prefix;
    }
    return sum;
  }();

  static constexpr void declare(detail::TensorSink& sink, const detail::NamePrefix* outer) {
    for (std::size_t i = 0; i != Times; ++i) {
      const detail::NamePrefix prefix{outer, Text.view(), i};
      List::declare(sink, &prefix);
    }
  }
};

namespace detail {

/// A list whose entries, also in scopes, are all of this role.
template <class L, TensorRole Role>
concept DeclarationListOf = Declaration<L> && L::well_formed && L::role == Role;

static_assert(Declaration<Parameter<"w", float, 2, 3>> && Declaration<ParameterList<>>);
static_assert(Declaration<Scope<"s", ParameterList<>>> &&
              Declaration<Repeat<"r", 2, BufferList<>>>);

}  // namespace detail

}  // namespace lockstep

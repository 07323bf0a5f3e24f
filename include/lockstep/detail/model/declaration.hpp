// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How a model declares its tensors: `Parameter`, `Buffer`, lists, `Scope` and `Repeat`.

#include "lockstep/detail/model/tensor.hpp"

namespace lockstep {

namespace detail {

/// An entry of a list: a tensor, or a scope with tensors inside. It has the number of its tensors
/// and the length of their joined names, and writes both into a `TensorSink`.
template <class D>
concept Declaration = requires(TensorSink& sink, const NamePrefix* outer) {
  { D::role } -> std::convertible_to<TensorRole>;
  { D::tensors } -> std::convertible_to<std::size_t>;
  { D::characters } -> std::convertible_to<std::size_t>;
  { D::well_formed } -> std::convertible_to<bool>;
  D::declare(sink, outer);
};

// A base class has a list's numbers: symbols that spell ten thousand parameters compile slowly.

template <TensorRole Role, bool WellFormed, std::size_t Tensors, std::size_t Characters>
struct DeclarationNumbers {
  static constexpr TensorRole role = Role;
  /// Are all entries declarations of this role? Otherwise the other members are meaningless.
  static constexpr bool well_formed = WellFormed;
  static constexpr std::size_t tensors = Tensors;
  static constexpr std::size_t characters = Characters;
};

template <TensorRole Role, Name Text, class T, std::size_t... E>
struct TensorDeclaration
    : DeclarationNumbers<Role, (sizeof...(E) <= max_tensor_rank), 1, Text.view().size()> {
  static constexpr void declare(TensorSink& sink, const NamePrefix* outer) {
    sink.append(outer, Text.view(), {element_kind<T>(), sizeof...(E), {E...}});
  }
};

template <TensorRole Role, class... Entries>
struct DeclarationList;

// Loops over initializer lists instead of folds: deeply nested expressions compile too slowly.

consteval bool all_of(std::initializer_list<bool> each) {
  return std::find(each.begin(), each.end(), false) == each.end();
}
consteval std::size_t sum_of(std::initializer_list<std::size_t> each) {
  std::size_t sum = 0;
  for (const std::size_t one : each) sum += one;
  return sum;
}

/// A layer that stands in both lists of a model, such as a batch norm, with its own lists.
template <class L>
concept LayerDeclaring =
    !Declaration<L> && (requires { typename L::Parameters; } || requires { typename L::Buffers; });

/// The list of one role that a class declares, or an empty list.
template <class Owner, TensorRole Role>
consteval auto declared_list() {
  if constexpr (Role == TensorRole::parameter && requires { typename Owner::Parameters; }) {
    return std::type_identity<typename Owner::Parameters>{};
  } else if constexpr (Role == TensorRole::buffer && requires { typename Owner::Buffers; }) {
    return std::type_identity<typename Owner::Buffers>{};
  } else {
    return std::type_identity<DeclarationList<Role>>{};
  }
}
template <class Owner, TensorRole Role>
using DeclaredList = typename decltype(declared_list<Owner, Role>())::type;

/// The part of an entry that belongs to a list of this role: a declaration, or a layer's list.
template <class Entry, TensorRole Role>
struct PartOf : std::type_identity<Entry> {};
template <LayerDeclaring Layer, TensorRole Role>
struct PartOf<Layer, Role> : std::type_identity<DeclaredList<Layer, Role>> {};

/// The numbers of an entry; ill-formed if it is no declaration.
template <class Entry>
consteval auto numbers_of() {
  if constexpr (Declaration<Entry>) {
    return DeclarationNumbers<Entry::role, Entry::well_formed, Entry::tensors, Entry::characters>{};
  } else {
    return DeclarationNumbers<TensorRole::parameter, false, 0, 0>{};
  }
}
template <class Entry, TensorRole Role>
consteval auto numbers_in() {
  return numbers_of<typename PartOf<Entry, Role>::type>();
}

template <class Entry>
consteval bool holds_only_norms() {
  if constexpr (requires { Entry::is_batch_norm; }) return Entry::is_batch_norm;
  if constexpr (requires { Entry::only_norms; }) return Entry::only_norms;
  return false;
}

template <TensorRole Role, class... Entries>
struct DeclarationList : DeclarationNumbers<Role,
                                            all_of({(numbers_in<Entries, Role>().well_formed &&
                                                     numbers_in<Entries, Role>().role == Role)...}),
                                            sum_of({numbers_in<Entries, Role>().tensors...}),
                                            sum_of({numbers_in<Entries, Role>().characters...})> {
  static constexpr bool only_norms = all_of({holds_only_norms<Entries>()...});
  static constexpr void declare([[maybe_unused]] TensorSink& sink,
                                [[maybe_unused]] const NamePrefix* outer) {
    // The elements of an initializer list are evaluated in order.
    static_cast<void>(
        std::initializer_list<int>{(PartOf<Entries, Role>::type::declare(sink, outer), 0)...});
  }
};

template <class Tensor>
struct StartsAtOne : Tensor {
  static constexpr void declare(TensorSink& sink, const NamePrefix* outer) {
    Tensor::declare(sink, outer);
    sink.info[-1].starts_at_one = true;
  }
};

/// The numbers of `Times` copies of a list, with `Prefixes` more characters per tensor. Errors are
/// left to the composition check: nvcc cannot partially specialise a scope on its name.
template <class List, std::size_t Times, std::size_t Prefixes>
using ScopedNumbers = DeclarationNumbers<
    numbers_of<List>().role, numbers_of<List>().well_formed, Times * numbers_of<List>().tensors,
    Times * numbers_of<List>().characters + Prefixes * numbers_of<List>().tensors>;

/// The total length of `prefix.0.` to `prefix.11.` for 12 copies.
consteval std::size_t repeated_characters(std::size_t prefix, std::size_t times) {
  std::size_t sum = 0;
  for (std::size_t i = 0; i != times; ++i) sum += prefix + decimal_digits(i) + 2;
  return sum;
}

}  // namespace detail

/// A trained tensor: `Parameter<"fc1.weight", float, 128, 784>`, row-major. Without extents it is a
/// scalar; `dynamic` extents are given by the model at construction.
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

/// Prefixes the names of a list: `Scope<"head", L>` turns `weight` into `head.weight`.
template <Name Text, class List>
struct Scope : detail::ScopedNumbers<List, 1, Text.view().size() + 1> {
  static constexpr bool only_norms = detail::holds_only_norms<List>();
  static constexpr void declare(detail::TensorSink& sink, const detail::NamePrefix* outer) {
    const detail::NamePrefix prefix{outer, Text.view()};
    List::declare(sink, &prefix);
  }
};

/// Repeats a list: `Repeat<"blocks", 12, L>` has `blocks.0.weight` to `blocks.11.weight`.
template <Name Text, std::size_t Times, class List>
struct Repeat
    : detail::ScopedNumbers<List, Times, detail::repeated_characters(Text.view().size(), Times)> {
  static constexpr bool only_norms = detail::holds_only_norms<List>();
  static constexpr void declare(detail::TensorSink& sink, const detail::NamePrefix* outer) {
    for (std::size_t i = 0; i != Times; ++i) {
      const detail::NamePrefix prefix{outer, Text.view(), i};
      List::declare(sink, &prefix);
    }
  }
};

namespace detail {

/// A list whose entries, nested ones included, all have this role.
template <class L, TensorRole Role>
concept DeclarationListOf = Declaration<L> && L::well_formed && L::role == Role;

static_assert(Declaration<Parameter<"w", float, 2, 3>> && Declaration<ParameterList<>>);
static_assert(Declaration<Scope<"s", ParameterList<>>> &&
              Declaration<Repeat<"r", 2, BufferList<>>>);

}  // namespace detail

}  // namespace lockstep

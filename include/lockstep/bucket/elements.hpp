// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file From a bucket's element kind, a value, back to a type.

#include <array>
#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/buckets.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/model/tensor_list.hpp"

namespace lockstep::detail {

/// The element kinds that Model's tensors of one role can have in a layout, each once.
template <class Model, TensorRole Role, class Types>
struct KindsOf {
  std::array<ElementKind, element_kinds> kinds{};
  std::size_t size = 0;

  constexpr KindsOf() {
    if constexpr (TensorListing<Model>) {
      for (const ElementKind kind : Model::Elements::kinds) {
        if (Role == TensorRole::buffer || is_floating(kind)) add(Types::of(kind));
      }
    } else {
      for (const TensorInfo& info : tensor_table<Model, Role>.infos) add(Types::of(info.element));
    }
  }

 private:
  constexpr void add(ElementKind element) {
    bool known = false;
    for (std::size_t k = 0; k != size; ++k) known = known || kinds[k] == element;
    if (!known) kinds[size++] = element;
  }
};

template <class Model, TensorRole Role, class Types = DeclaredTypes>
inline constexpr KindsOf<Model, Role, Types> kinds_of{};

/// Calls `f(std::type_identity<T>{})` with the type behind `kind`, one of those that the model has.
/// For a model with one element type nothing is decided at run time.
template <class Model, TensorRole Role, class Types = DeclaredTypes, class F>
constexpr void with_element(ElementKind kind, F&& f) {
  constexpr const auto& all = kinds_of<Model, Role, Types>;
  if constexpr (all.size == 1) {
    f(std::type_identity<ElementOf<all.kinds[0]>>{});
  } else {
    [&]<std::size_t... K>(std::index_sequence<K...>) {
      static_cast<void>(
          ((kind == all.kinds[K] && (f(std::type_identity<ElementOf<all.kinds[K]>>{}), true)) ||
           ...));
    }(std::make_index_sequence<all.size>{});
  }
}

/// A piece of an arena as elements.
template <class T>
std::span<T> elements_at(std::byte* arena, std::size_t offset, std::size_t bytes) {
  return {reinterpret_cast<T*>(arena + offset), bytes / sizeof(T)};
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Finds a tensor by its key, `"fc1.weight"_p`, or by its number.

#include <concepts>
#include <cstddef>

#include "lockstep/core/element.hpp"
#include "lockstep/core/name.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/model/tensor_list.hpp"

namespace lockstep {

/// The tensor that Key names among Model's parameters or buffers: one instantiation per name,
/// however often it is used.
template <class Model, detail::TensorRole Role, class Key>
struct NamedTensor {
 private:
  static constexpr std::size_t found = [] {
    if constexpr (detail::NameKey<Key>) {
      return detail::name_index<Model, Role>.find(Key::name);
    } else {
      return std::size_t{0};
    }
  }();
  static_assert(detail::NameKey<Key>,
                "lockstep: the key of a declared tensor is its name with _p behind it; write "
                "step.param(\"weight\"_p), step.ready(\"weight\"_p), and using namespace lockstep");
  static_assert(
      Role != detail::TensorRole::parameter || found != detail::not_found,
      "lockstep: the model declares no parameter of this name; compare the spelling with its "
      "ParameterList (the compiler prints the name beside this sentence)");
  static_assert(
      Role != detail::TensorRole::buffer || found != detail::not_found,
      "lockstep: the model declares no buffer of this name; compare the spelling with its "
      "BufferList, in which a batch norm stands too (the compiler prints the name beside this "
      "sentence)");

 public:
  static constexpr bool is_declared = detail::NameKey<Key> && found != detail::not_found;
  /// Its place in declaration order; any place after an error, so that there is only one error.
  static constexpr std::size_t index = found == detail::not_found ? 0 : found;
  static constexpr detail::TensorInfo info = detail::tensor_table<Model, Role>.infos[index];
};

/// The key of a listed tensor whose model lists several element types: `Listed<double>{3}`. Where a
/// model lists one, a tensor's number alone is its key.
template <Element T>
struct Listed {
  std::size_t index;
};

namespace detail {

/// A tensor whose number is known at run time only.
struct ListedTensor {
  std::size_t index;
};

template <class Key>
inline constexpr ElementKind listed_kind = ElementKind::unsupported;
template <class T>
inline constexpr ElementKind listed_kind<Listed<T>> = element_kind<T>();

/// The tensor behind a key. Its `index` is a constant where the key is a name.
template <class Model, TensorRole Role, class Key>
consteval auto find_tensor(Key) {
  return NamedTensor<Model, Role, Key>{};
}
template <TensorListing Model, TensorRole Role, class Key>
constexpr auto find_tensor([[maybe_unused]] Key key) {
  if constexpr (listed_kind<Key> != ElementKind::unsupported) {
    return ListedTensor{key.index};
  } else if constexpr (std::integral<Key>) {
    return ListedTensor{static_cast<std::size_t>(key)};
  } else {
    static_assert(sizeof(Key) == 0,
                  "lockstep: the model lists its tensors at run time, so that their keys are "
                  "numbers: step.param(0)");
    return ListedTensor{};
  }
}

/// The element type that a key gives a listed tensor.
template <TensorListing Model, class Key>
consteval ElementKind kind_of_listed() {
  constexpr ElementKind kind = listed_kind<Key>;
  static_assert(
      !std::integral<Key> || Model::Elements::kinds.size() == 1,
      "lockstep: the model lists several element types, and a view needs to know which one its "
      "tensor has: step.param(Listed<float>{0})");
  return kind == ElementKind::unsupported ? Model::Elements::kinds[0] : kind;
}

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The element types of tensors, in lockstep's words and in LibTorch's.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "lockstep/core/element.hpp"
#include "lockstep/model/tensor_list.hpp"

namespace lockstep::detail {

/// The kind of a tensor's elements; `unsupported` where lockstep has none. Booleans travel as the
/// bytes that they are.
constexpr ElementKind kind_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return ElementKind::f64;
    case at::kFloat:
      return ElementKind::f32;
    case at::kHalf:
      return ElementKind::f16;
    case at::kBFloat16:
      return ElementKind::bf16;
    case at::kChar:
      return ElementKind::i8;
    case at::kShort:
      return ElementKind::i16;
    case at::kInt:
      return ElementKind::i32;
    case at::kLong:
      return ElementKind::i64;
    case at::kByte:
    case at::kBool:
      return ElementKind::u8;
    case at::kUInt16:
      return ElementKind::u16;
    case at::kUInt32:
      return ElementKind::u32;
    case at::kUInt64:
      return ElementKind::u64;
    default:
      return ElementKind::unsupported;
  }
}

/// The type of tensors whose elements are of this kind.
constexpr at::ScalarType scalar_type_of(ElementKind kind) {
  constexpr at::ScalarType types[element_kinds] = {at::ScalarType::Undefined,
                                                   at::kDouble,
                                                   at::kFloat,
                                                   at::kHalf,
                                                   at::kBFloat16,
                                                   at::kChar,
                                                   at::kShort,
                                                   at::kInt,
                                                   at::kLong,
                                                   at::kByte,
                                                   at::kUInt16,
                                                   at::kUInt32,
                                                   at::kUInt64};
  return types[static_cast<std::size_t>(kind)];
}

/// The type of tensors with elements T.
template <Element T>
inline constexpr at::ScalarType scalar_type = scalar_type_of(element_kind<T>());

/// The element types of a module's tensors: those of its parameters, and what buffers have besides,
/// which are counts and masks.
template <Element... Ts>
struct TorchElements : ElementList<Ts..., std::int64_t, std::uint8_t> {
  static constexpr bool contains(ElementKind kind) {
    return std::ranges::find(TorchElements::kinds, kind) != TorchElements::kinds.end();
  }
  /// Calls `f(std::type_identity<T>{})` with the type behind a kind, of any tensor.
  template <class F>
  static void with(ElementKind kind, const F& f) {
    with_one_of<Ts..., std::int64_t, std::uint8_t>(kind, f);
  }
  /// The same for parameters: nothing is decided at run time where all have one type.
  template <class F>
  static void with_parameter(ElementKind kind, const F& f) {
    if constexpr (sizeof...(Ts) == 1) {
      (f(std::type_identity<Ts>{}), ...);
    } else {
      with_one_of<Ts...>(kind, f);
    }
  }

 private:
  template <class... Us, class F>
  static void with_one_of(ElementKind kind, const F& f) {
    static_cast<void>(((kind == element_kind<Us>() && (f(std::type_identity<Us>{}), true)) || ...));
  }
};
template <>
struct TorchElements<> : TorchElements<float> {};

static_assert(kind_of(scalar_type<float>) == ElementKind::f32);
static_assert(kind_of(scalar_type<std::int64_t>) == ElementKind::i64);
static_assert(kind_of(scalar_type<BFloat16>) == ElementKind::bf16);

}  // namespace lockstep::detail

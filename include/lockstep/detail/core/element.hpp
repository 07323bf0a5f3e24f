// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The element types of tensors, as types and as enumerators, and conversion between them.

#include <tuple>

#include "lockstep/detail/core/half.hpp"

namespace lockstep {

/// The element types as values. The numbers are fixed: ranks and fingerprints depend on them.
enum class ElementKind : std::uint8_t {
  unsupported = 0,
  f64 = 1,
  f32 = 2,
  f16 = 3,
  bf16 = 4,
  i8 = 5,
  i16 = 6,
  i32 = 7,
  i64 = 8,
  u8 = 9,
  u16 = 10,
  u32 = 11,
  u64 = 12,
};

/// The kind of T; `unsupported` if no tensor can hold T. `long` and `long long` are one kind.
template <class T>
constexpr ElementKind element_kind() {
  if constexpr (std::same_as<T, double>) return ElementKind::f64;
  if constexpr (std::same_as<T, float>) return ElementKind::f32;
  if constexpr (std::same_as<T, Half>) return ElementKind::f16;
  if constexpr (std::same_as<T, BFloat16>) return ElementKind::bf16;
  if constexpr (std::integral<T> && !std::same_as<T, bool> &&
                std::same_as<T, std::remove_cv_t<T>>) {
    constexpr bool is_signed = std::is_signed_v<T>;
    if constexpr (sizeof(T) == 1) return is_signed ? ElementKind::i8 : ElementKind::u8;
    if constexpr (sizeof(T) == 2) return is_signed ? ElementKind::i16 : ElementKind::u16;
    if constexpr (sizeof(T) == 4) return is_signed ? ElementKind::i32 : ElementKind::u32;
    if constexpr (sizeof(T) == 8) return is_signed ? ElementKind::i64 : ElementKind::u64;
  }
  return ElementKind::unsupported;
}

/// A type that tensors hold and collectives reduce.
template <class T>
concept Element = element_kind<T>() != ElementKind::unsupported;

/// An element type that can have gradients.
template <class T>
concept FloatingElement = Element<T> && !std::integral<T>;

/// An integer element type.
template <class T>
concept IntegerElement = Element<T> && std::integral<T>;

static_assert(FloatingElement<double> && FloatingElement<float>);
static_assert(FloatingElement<Half> && FloatingElement<BFloat16>);
static_assert(IntegerElement<std::int8_t> && IntegerElement<std::uint64_t>);
static_assert(!Element<bool> && !Element<long double> && !Element<const float>);

namespace detail {

inline constexpr std::size_t element_kinds = 13;

constexpr bool is_floating(ElementKind kind) {
  return kind >= ElementKind::f64 && kind <= ElementKind::bf16;
}

constexpr std::size_t element_size(ElementKind kind) {
  constexpr std::size_t sizes[element_kinds] = {0, 8, 4, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8};
  return sizes[static_cast<std::size_t>(kind)];
}

constexpr std::string_view element_name(ElementKind kind) {
  constexpr std::string_view names[element_kinds] = {
      "unsupported", "double", "float", "half",   "bfloat16", "int8",  "int16",
      "int32",       "int64",  "uint8", "uint16", "uint32",   "uint64"};
  return names[static_cast<std::size_t>(kind)];
}

/// In the order of `ElementKind`.
using ElementTypes =
    std::tuple<void, double, float, Half, BFloat16, std::int8_t, std::int16_t, std::int32_t,
               std::int64_t, std::uint8_t, std::uint16_t, std::uint32_t, std::uint64_t>;

}  // namespace detail

/// The type of a kind.
template <ElementKind Kind>
using ElementOf = std::tuple_element_t<static_cast<std::size_t>(Kind), detail::ElementTypes>;

namespace detail {

/// T itself, obtained from its kind, because nvcc spells a type the way it was obtained.
template <class T>
using SameElement = ElementOf<element_kind<T>()>;

static_assert(element_kind<ElementOf<ElementKind::bf16>>() == ElementKind::bf16);
static_assert(element_kind<ElementOf<ElementKind::u64>>() == ElementKind::u64);

/// The type in which T is summed: float for 16-bit floats, unsigned for integers, which then wrap.
template <Element T>
using Accumulator = std::tuple_element_t<
    static_cast<std::size_t>(element_kind<T>()),
    std::tuple<void, double, float, float, float, std::uint8_t, std::uint16_t, std::uint32_t,
               std::uint64_t, std::uint8_t, std::uint16_t, std::uint32_t, std::uint64_t>>;

/// Converts elements through their accumulator types: double to a 16-bit type rounds twice.
template <class To, class From>
constexpr void convert(To* to, const From* from, std::size_t count) {
  for (std::size_t i = 0; i != count; ++i)
    to[i] = static_cast<To>(static_cast<Accumulator<To>>(static_cast<Accumulator<From>>(from[i])));
}

/// The same for kinds known at run time: two floating kinds, or one kind, which is copied.
void convert_elements(std::byte* to, ElementKind to_kind, const std::byte* from,
                      ElementKind from_kind, std::size_t count);

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The description of a tensor, and the sink to which declarations append it.

#include <initializer_list>

#include "lockstep/detail/core/bytes.hpp"
#include "lockstep/detail/core/dynamic.hpp"
#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/name.hpp"

namespace lockstep::detail {

/// A bound on the rank, so that the tables have a fixed size.
inline constexpr std::size_t max_tensor_rank = 8;

/// An element type and a shape. Declarations are expanded once into tables of these values.
struct TensorInfo {
  ElementKind element = ElementKind::unsupported;
  std::size_t rank = 0;
  std::array<std::size_t, max_tensor_rank> extents{};
  /// Are the initial elements one instead of zero, unless the model writes them?
  bool starts_at_one = false;
  bool is_frozen = false;

  constexpr bool is_dynamic() const {
    for (std::size_t i = 0; i < rank; ++i) {
      if (extents[i] == dynamic) return true;
    }
    return false;
  }

  /// The number of elements, or `too_large`; undefined while an extent is dynamic.
  constexpr std::size_t count() const {
    std::size_t product = 1;
    for (std::size_t i = 0; i < rank; ++i) product = saturating_product(product, extents[i]);
    return product;
  }

  constexpr std::size_t bytes() const { return saturating_product(count(), element_size(element)); }

  friend constexpr bool operator==(const TensorInfo&, const TensorInfo&) = default;
};

/// The first tensor at which the sum of sizes exceeds the largest arena, or `infos.size()`.
constexpr std::size_t first_beyond_arena(const auto& infos) {
  std::size_t all = 0;
  for (std::size_t i = 0; i != infos.size(); ++i) {
    const std::size_t bytes = infos[i].is_dynamic() ? 0 : infos[i].bytes();
    if (bytes > most_arena_bytes) return i;
    all += align_up(bytes);
    if (all > most_arena_bytes) return i;
  }
  return infos.size();
}

enum class TensorRole : std::uint8_t { parameter, buffer };

/// A further name of a parameter or buffer in checkpoints.
struct NameAlias {
  std::string name;
  std::string of;
};

/// The scopes around a declaration, from the inside out.
struct NamePrefix {
  const NamePrefix* outer;
  std::string_view name;
  std::size_t index = dynamic;  // `dynamic`: no index

  /// Writes `outer.name.` or `outer.name.index.` and returns the end.
  constexpr char* write(char* out) const {
    if (outer != nullptr) out = outer->write(out);
    for (char c : name) *out++ = c;
    *out++ = '.';
    if (index != dynamic) {
      out = write_decimal(out, index);
      *out++ = '.';
    }
    return out;
  }
};

/// Appends tensors to arrays. No template, so that a thousand declarations share the code.
struct TensorSink {
  char* text;
  std::size_t* name_end;
  TensorInfo* info;
  std::size_t written = 0;

  constexpr void append(const NamePrefix* outer, std::string_view name, TensorInfo tensor) {
    char* const begin = text;
    if (outer != nullptr) text = outer->write(text);
    for (char c : name) *text++ = c;
    written += static_cast<std::size_t>(text - begin);
    *name_end++ = written;
    *info++ = tensor;
  }
};

}  // namespace lockstep::detail

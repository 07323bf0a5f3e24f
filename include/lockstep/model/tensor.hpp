// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The description of one tensor as a value, which plans, fingerprints and views read, and
/// where declarations write them, one after the other.

#include <initializer_list>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/name.hpp"

namespace lockstep::detail {

/// The most extents a tensor can have. A bound keeps the tables flat.
inline constexpr std::size_t max_tensor_rank = 8;

/// An element type and a shape. Types are rebuilt from it, so that a model's declarations are
/// walked once and everything after reads this table.
struct TensorInfo {
  ElementKind element = ElementKind::unsupported;
  std::size_t rank = 0;
  std::array<std::size_t, max_tensor_rank> extents{};
  /// Are its elements one before the first step, unless the model writes them? Others are zero.
  bool starts_at_one = false;
  /// Is it a listed parameter that has no gradient?
  bool is_frozen = false;

  /// Does it have extents that are known at construction only?
  constexpr bool is_dynamic() const {
    for (std::size_t i = 0; i < rank; ++i) {
      if (extents[i] == dynamic) return true;
    }
    return false;
  }

  /// The number of elements, or `too_large`. It is undefined while an extent is dynamic.
  constexpr std::size_t count() const {
    std::size_t product = 1;
    for (std::size_t i = 0; i < rank; ++i) product = saturating_product(product, extents[i]);
    return product;
  }

  /// The number of bytes, or `too_large`.
  constexpr std::size_t bytes() const { return saturating_product(count(), element_size(element)); }

  friend constexpr bool operator==(const TensorInfo&, const TensorInfo&) = default;
};

/// The first tensor with which all tensors so far take more than an arena can have; the number of
/// tensors if there is none.
template <class Infos>
constexpr std::size_t first_beyond_arena(const Infos& infos) {
  std::size_t all = 0;
  for (std::size_t i = 0; i != infos.size(); ++i) {
    const std::size_t bytes = infos[i].is_dynamic() ? 0 : infos[i].bytes();
    if (bytes > most_arena_bytes) return i;
    all += align_up(bytes);
    if (all > most_arena_bytes) return i;
  }
  return infos.size();
}

/// The role of a tensor in its model.
enum class TensorRole : std::uint8_t { parameter, buffer };

/// One more name of a parameter or buffer, under which a checkpoint has it too.
struct NameAlias {
  std::string name;
  std::string of;
};

/// The scopes around a declaration, innermost first.
struct NamePrefix {
  const NamePrefix* outer;
  std::string_view name;
  std::size_t index = dynamic;  // `dynamic`: not repeated

  /// Writes `outer.name.` or `outer.name.index.` and returns the place behind it.
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

/// Appends tensors to arrays. It is no template, so that a thousand declarations share its code.
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

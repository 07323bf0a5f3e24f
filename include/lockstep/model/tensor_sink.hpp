// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Where declarations are written: joined names and tensor infos, one after the other.

#include <cstddef>
#include <string_view>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/name.hpp"
#include "lockstep/model/tensor.hpp"

namespace lockstep::detail {

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

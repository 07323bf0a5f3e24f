// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `safetensors.hpp`.

#include "lockstep/checkpoint/safetensors.hpp"
#include "lockstep/core/error.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::span<const FileElement> file_elements() {
  static constexpr ElementKind none = ElementKind::unsupported;
  static constexpr FileElement elements[] = {
      {"F64", ElementKind::f64, 64},
      {"F32", ElementKind::f32, 32},
      {"F16", ElementKind::f16, 16},
      {"BF16", ElementKind::bf16, 16},
      {"I8", ElementKind::i8, 8},
      {"I16", ElementKind::i16, 16},
      {"I32", ElementKind::i32, 32},
      {"I64", ElementKind::i64, 64},
      {"U8", ElementKind::u8, 8},
      {"U16", ElementKind::u16, 16},
      {"U32", ElementKind::u32, 32},
      {"U64", ElementKind::u64, 64},
      {"BOOL", none, 8},
      {"C64", none, 64},
      {"F8_E4M3", none, 8},
      {"F8_E5M2", none, 8},
      {"F8_E8M0", none, 8},
      {"F6_E2M3", none, 6},
      {"F6_E3M2", none, 6},
      {"F4", none, 4},
  };
  return elements;
}

LOCKSTEP_INLINE const FileElement* file_element(std::string_view name) {
  for (const FileElement& element : file_elements()) {
    if (element.name == name) return &element;
  }
  return nullptr;
}

LOCKSTEP_INLINE const FileElement* file_element(ElementKind kind) {
  for (const FileElement& element : file_elements()) {
    if (element.kind == kind && kind != ElementKind::unsupported) return &element;
  }
  return nullptr;
}

LOCKSTEP_INLINE std::string shape_text(std::span<const std::uint64_t> shape) {
  std::string out = "[";
  for (const std::uint64_t extent : shape) {
    if (out.size() > 1) out += ", ";
    Word(extent).append_to(out);
  }
  return out += "]";
}

LOCKSTEP_INLINE void fail_writing(std::string_view path, int error) {
  fail_writing("checkpoint", path, error);
}

LOCKSTEP_INLINE void fail_reading(std::string_view path, int error) {
  fail_reading("checkpoint", path, error);
}

LOCKSTEP_INLINE void fail_damaged(std::string_view path, std::string_view problem) {
  fail("checkpoint", {"'", path, "' is damaged or no safetensors file: ", problem},
       "copy it again, or take another");
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The safetensors format: its limits, its element types, and how errors about files are
/// said.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/core/element.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

static_assert(std::endian::native == std::endian::little,
              "lockstep: safetensors files are little-endian, and this machine is not");

/// A longer header is refused, as Python's reader refuses it.
inline constexpr std::uint64_t most_header_bytes = 100'000'000;

/// An element type of the format. `kind` is `unsupported` where no tensor of lockstep's holds it:
/// such tensors are listed and checked, and an error if they are wanted.
struct FileElement {
  std::string_view name;
  ElementKind kind;
  unsigned bits;
};

/// All types of the format.
std::span<const FileElement> file_elements();

/// The type of this name, or of this kind; null where the format has none.
const FileElement* file_element(std::string_view name);
const FileElement* file_element(ElementKind kind);

/// a * b and a + b of sizes that a file claims; false where they do not fit.
inline bool multiply(std::uint64_t a, std::uint64_t b, std::uint64_t& product) {
  return !__builtin_mul_overflow(a, b, &product);
}
inline bool add_up(std::uint64_t a, std::uint64_t b, std::uint64_t& sum) {
  return !__builtin_add_overflow(a, b, &sum);
}

/// "[4, 3]", as Python writes it.
std::string shape_text(std::span<const std::uint64_t> shape);

/// The errors of `core/file.hpp`, for files of checkpoints.
[[noreturn, gnu::cold]] void fail_writing(std::string_view path, int error);
[[noreturn, gnu::cold]] void fail_reading(std::string_view path, int error);

/// Throws: what is wrong with the contents of a file.
[[noreturn, gnu::cold]] void fail_damaged(std::string_view path, std::string_view problem);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/checkpoint/safetensors.ipp"
#endif

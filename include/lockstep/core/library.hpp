// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The link check of LOCKSTEP_COMPILED: a program that includes this header links only with
/// the library of its own version.

#include <cstdint>
#include <string_view>

#include "lockstep/version.hpp"

namespace lockstep::detail {

/// The version as a number. (`hash.hpp` includes macros.hpp, which includes this header.)
constexpr std::uint64_t version_number(std::string_view text) {
  std::uint64_t number = 0;
  for (const char c : text) number = 131 * number + static_cast<unsigned char>(c);
  return number;
}

template <std::uint64_t Version>
struct LibraryOfThisVersion {
  static const char is_linked;
};

/// Declared before it is used, as the standard wants it of what the library specialises.
template <>
const char LibraryOfThisVersion<version_number(version)>::is_linked;

[[maybe_unused, gnu::used]] static const char* const library =
    &LibraryOfThisVersion<version_number(version)>::is_linked;

}  // namespace lockstep::detail

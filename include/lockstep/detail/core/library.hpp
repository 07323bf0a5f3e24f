// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The link check of LOCKSTEP_COMPILED: a program links only with the library of its version.

#include "lockstep/version.hpp"

namespace lockstep::detail {

/// FNV-1a of the version. `Hash` cannot be used: its header includes this one.
constexpr std::uint64_t version_key() {
  std::uint64_t key = 0xcbf29ce484222325U;
  for (const char c : version) key = (key ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return key;
}

template <std::uint64_t Version>
struct LibraryOfThisVersion {
  static const char is_linked;
};

/// The standard requires this declaration before the first use, because the library specialises it.
template <>
const char LibraryOfThisVersion<version_key()>::is_linked;

[[maybe_unused, gnu::used]] static const char* const library =
    &LibraryOfThisVersion<version_key()>::is_linked;

}  // namespace lockstep::detail

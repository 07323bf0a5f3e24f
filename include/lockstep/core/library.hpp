// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The link check of LOCKSTEP_COMPILED: a program that includes this header links only with
/// the library of its own version.

#include <cstdint>

#include "lockstep/core/hash.hpp"
#include "lockstep/version.hpp"

namespace lockstep::detail {

template <std::uint64_t Version>
struct LibraryOfThisVersion {
  static const char is_linked;
};

/// Declared before it is used, as the standard wants it of what the library specialises.
template <>
const char LibraryOfThisVersion<hash_of(version)>::is_linked;

[[maybe_unused, gnu::used]] static const char* const library =
    &LibraryOfThisVersion<hash_of(version)>::is_linked;

}  // namespace lockstep::detail

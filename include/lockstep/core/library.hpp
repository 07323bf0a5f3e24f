// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A program that is compiled with LOCKSTEP_COMPILED, and with it includes this header, links
/// the library of its own version or does not link at all.

#include <cstdint>

#include "lockstep/core/hash.hpp"
#include "lockstep/version.hpp"

namespace lockstep::detail {

template <std::uint64_t Version>
struct LibraryOfThisVersion {
  static const char is_linked;
};

[[maybe_unused, gnu::used]] static const char* const library =
    &LibraryOfThisVersion<hash_of(version)>::is_linked;

}  // namespace lockstep::detail

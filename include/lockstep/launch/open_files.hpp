// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How many files, sockets and pipes a process may have open: the limit is raised to what a
/// job needs, and where that is not allowed the error says so before any rank waits.

#include <cstddef>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// How many descriptors this process has open.
std::size_t open_files();

/// Lets this process open `more` files beside those that it has: raises the soft limit
/// (RLIMIT_NOFILE) if that is lower, no further than needed. Throws if the hard limit is too low;
/// `whose` says what needs them: "the store of a job of 2000 ranks". Programs that this process
/// starts inherit the limit. Returns how many it may open now.
std::size_t allow_open_files(std::size_t more, const char* whose, std::size_t ranks);

/// The same for files that are welcome but not needed: never throws.
std::size_t prefer_open_files(std::size_t more);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/open_files.ipp"
#endif

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Lists of names in messages.

#include <string>
#include <vector>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// The first few of many, so that messages stay readable with a thousand ranks.
std::string listed(const std::vector<std::string>& names);

/// `rank 2`, or `ranks 0, 1, 3`.
std::string listed_ranks(const std::vector<std::string>& ranks);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/names.ipp"
#endif

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The library's version: the build, the packages and the fingerprint of a job read it here.

#include <string_view>

namespace lockstep {

/// The version of the library, which is part of every job's fingerprint.
inline constexpr std::string_view version = "0.1.0";

}  // namespace lockstep

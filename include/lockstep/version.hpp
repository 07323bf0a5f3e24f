// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The library's version, for the build, the packages and the fingerprint of a job.

#include <string_view>

namespace lockstep {

/// The library's version, part of every job's fingerprint.
inline constexpr std::string_view version = "0.1.0";

}  // namespace lockstep

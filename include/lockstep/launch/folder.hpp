// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Folders that several processes write into: making one, and saying who has it.

#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// Makes a folder, and those that it is in, unless it exists. Returns whether it was made.
bool make_folder(std::string_view operation, const std::string& folder);

/// Who this process is, for whoever waits for what it has locked: "process 12 on host, /program,
/// since 2026-01-31 12:00:00 UTC".
std::string owner_text();

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/folder.ipp"
#endif

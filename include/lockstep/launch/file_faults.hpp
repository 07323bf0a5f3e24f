// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What is said where a file cannot be read or written, and the parts of its path.

#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// The folder a path is in, "." where it names none; and the name within it.
std::string folder_of(std::string_view path);
std::string_view name_in_folder(std::string_view path);

/// Throws: which file, which system call's work, why, and what to do about it.
[[noreturn, gnu::cold]] void fail_writing(std::string_view operation, std::string_view path,
                                          int error);
[[noreturn, gnu::cold]] void fail_reading(std::string_view operation, std::string_view path,
                                          int error);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/file_faults.ipp"
#endif

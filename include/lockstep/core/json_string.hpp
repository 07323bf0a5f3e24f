// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Texts as JSON has them: quotation marks, escapes, UTF-8.

#include <cstddef>
#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// How many bytes the UTF-8 character at the front has; 0 where there is none (RFC 3629: no
/// overlong forms, no surrogates, nothing above U+10FFFF).
std::size_t utf8_size(std::string_view text);

bool is_utf8(std::string_view text);

/// Appends `text` in quotation marks. Bytes that are no UTF-8, as paths may have them, become
/// U+FFFD: a reader would reject all of it for them.
void append_json_string(std::string& out, std::string_view text);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/core/json_string.ipp"
#endif

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `json_line.hpp`.

#include <charconv>
#include <cmath>
#include <cstddef>

#include "lockstep/observe/json_line.hpp"

namespace lockstep {

namespace detail {

/// How many bytes the UTF-8 character at the front has; 0 where there is none (RFC 3629: no
/// overlong forms, no surrogates, nothing above U+10FFFF).
LOCKSTEP_INLINE std::size_t utf8_size(std::string_view text) {
  const auto byte = [text](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const auto follows = [byte](std::size_t i, unsigned low = 0x80, unsigned high = 0xbf) {
    return byte(i) >= low && byte(i) <= high;
  };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return follows(1) ? 2 : 0;
  if (lead >= 0xe0 && lead <= 0xef) {
    const bool second = follows(1, lead == 0xe0 ? 0xa0 : 0x80, lead == 0xed ? 0x9f : 0xbf);
    return second && follows(2) ? 3 : 0;
  }
  if (lead >= 0xf0 && lead <= 0xf4) {
    const bool second = follows(1, lead == 0xf0 ? 0x90 : 0x80, lead == 0xf4 ? 0x8f : 0xbf);
    return second && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

LOCKSTEP_INLINE void append_json_string(std::string& out, std::string_view text) {
  out += '"';
  while (!text.empty()) {
    const char c = text.front();
    const std::size_t size = utf8_size(text);
    if (size == 0) {
      out += "\xef\xbf\xbd";
    } else if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (size == 1 && static_cast<unsigned char>(c) < 0x20) {
      out += "\\u00";
      out += static_cast<char>('0' + (c >> 4));
      out += "0123456789abcdef"[c & 15];
    } else {
      out += text.substr(0, size);
    }
    text.remove_prefix(size == 0 ? 1 : size);
  }
  out += '"';
}

LOCKSTEP_INLINE std::string json_digits(bool is_finite, auto value) {
  if (!is_finite) return "null";
  char digits[64];
  return {digits, std::to_chars(digits, digits + sizeof digits, value).ptr};
}
LOCKSTEP_INLINE std::string json_number(float value) {
  return json_digits(std::isfinite(value), value);
}
LOCKSTEP_INLINE std::string json_number(double value) {
  return json_digits(std::isfinite(value), value);
}
LOCKSTEP_INLINE std::string json_number(long double value) {
  return json_digits(std::isfinite(value), value);
}

}  // namespace detail

LOCKSTEP_INLINE void JsonLine::add_name(std::string_view name) {
  if (!members_.empty()) members_ += ',';
  detail::append_json_string(members_, name);
  members_ += ':';
}

LOCKSTEP_INLINE JsonLine& JsonLine::add(const JsonLine& others) {
  if (!members_.empty() && !others.members_.empty()) members_ += ',';
  members_ += others.members_;
  return *this;
}

LOCKSTEP_INLINE void JsonLine::add_word(std::string_view name, detail::Word value) {
  add_name(name);
  value.append_to(members_);
}

}  // namespace lockstep

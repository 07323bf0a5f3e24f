// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `json_line.hpp`.

#include <charconv>
#include <cmath>

#include "lockstep/observe/json_line.hpp"

namespace lockstep {

namespace detail {

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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `json_cursor.hpp`.

#include <charconv>
#include <system_error>

#include "lockstep/checkpoint/json_cursor.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/json_string.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void JsonCursor::fail(std::string_view problem) const {
  detail::fail("checkpoint", {whose_, ": ", problem, " at byte ", place_},
               "the file is damaged or no such file: copy it again, or take another");
}

LOCKSTEP_INLINE char JsonCursor::peek() {
  while (place_ < text_.size()) {
    const char c = text_[place_];
    if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return c;
    ++place_;
  }
  return 0;
}

LOCKSTEP_INLINE void JsonCursor::expect(char c, std::string_view problem) {
  if (peek() != c) fail(problem);
  ++place_;
}

LOCKSTEP_INLINE void JsonCursor::open_object() {
  expect('{', "an object should begin");
  is_first_ = true;
}

LOCKSTEP_INLINE void JsonCursor::open_array() {
  expect('[', "an array should begin");
  is_first_ = true;
}

/// Goes to what follows within the brackets; false when they are closed.
LOCKSTEP_INLINE bool JsonCursor::next(char close) {
  const bool is_first = is_first_;
  is_first_ = false;
  if (peek() == close) {
    ++place_;
    return false;
  }
  if (!is_first) expect(',', "a comma or a closing bracket is missing");
  return true;
}

LOCKSTEP_INLINE bool JsonCursor::next_item() { return next(']'); }

LOCKSTEP_INLINE bool JsonCursor::next_member(std::string& name) {
  if (!next('}')) return false;
  if (peek() != '"') fail("a member's name is missing");
  name = string();
  expect(':', "a colon is missing");
  return true;
}

LOCKSTEP_INLINE void JsonCursor::finish() {
  if (peek() != 0 || place_ != text_.size()) fail("something follows the end");
}

LOCKSTEP_INLINE void JsonCursor::word(std::string_view word) {
  if (peek() == 0 || !text_.substr(place_).starts_with(word)) fail("a value should be here");
  place_ += word.size();
}

/// The four digits of `\u`.
LOCKSTEP_INLINE unsigned JsonCursor::escaped_unit() {
  unsigned unit = 0;
  if (text_.size() - place_ < 4) fail("the text ends within an escape");
  const char* const end = text_.data() + place_ + 4;
  const auto [stop, error] = std::from_chars(text_.data() + place_, end, unit, 16);
  if (error != std::errc() || stop != end) fail("an escape is no four digits");
  place_ += 4;
  return unit;
}

LOCKSTEP_INLINE void JsonCursor::append_escaped(std::string& out) {
  constexpr std::string_view escapes = "\"\\/bfnrt";
  constexpr std::string_view meanings = "\"\\/\b\f\n\r\t";
  const char c = place_ < text_.size() ? text_[place_++] : '\0';
  if (const std::size_t known = escapes.find(c); known != std::string_view::npos) {
    out += meanings[known];
    return;
  }
  if (c != 'u') fail("an escape is unknown");
  unsigned code = escaped_unit();
  if (code >= 0xdc00 && code < 0xe000) fail("half of a surrogate pair stands alone");
  if (code >= 0xd800 && code < 0xdc00) {
    if (!text_.substr(place_).starts_with("\\u")) fail("half of a surrogate pair stands alone");
    place_ += 2;
    const unsigned low = escaped_unit();
    if (low < 0xdc00 || low >= 0xe000) fail("half of a surrogate pair stands alone");
    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
  }
  const auto follow = [&out](unsigned bits) { out += static_cast<char>(0x80 | (bits & 0x3f)); };
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xc0 | code >> 6);
    follow(code);
  } else if (code < 0x10000) {
    out += static_cast<char>(0xe0 | code >> 12);
    follow(code >> 6);
    follow(code);
  } else {
    out += static_cast<char>(0xf0 | code >> 18);
    follow(code >> 12);
    follow(code >> 6);
    follow(code);
  }
}

LOCKSTEP_INLINE std::string JsonCursor::string() {
  expect('"', "a text should begin");
  std::string out;
  for (;;) {
    // Plain characters are taken together.
    std::size_t end = place_;
    while (end < text_.size()) {
      const auto c = static_cast<unsigned char>(text_[end]);
      if (c == '"' || c == '\\' || c < 0x20 || c >= 0x80) break;
      ++end;
    }
    out.append(text_, place_, end - place_);
    place_ = end;
    if (place_ == text_.size()) fail("a text has no end");
    const char c = text_[place_];
    if (c == '"') {
      ++place_;
      return out;
    }
    if (c == '\\') {
      ++place_;
      append_escaped(out);
      continue;
    }
    if (static_cast<unsigned char>(c) < 0x20) fail("a text holds a control character");
    const std::size_t size = utf8_size(text_.substr(place_));
    if (size == 0) fail("a text is not UTF-8");
    out.append(text_, place_, size);
    place_ += size;
  }
}

LOCKSTEP_INLINE JsonCursor::Number JsonCursor::number() {
  peek();
  std::size_t end = place_;
  const auto digits = [&] {
    const std::size_t begin = end;
    while (end < text_.size() && text_[end] >= '0' && text_[end] <= '9') ++end;
    return end - begin;
  };
  const auto skip = [&](std::string_view any) {
    const bool is_here = end < text_.size() && any.find(text_[end]) != std::string_view::npos;
    end += is_here ? 1 : 0;
    return is_here;
  };
  const bool is_negative = skip("-");
  const std::size_t first = end;
  const std::size_t whole = digits();
  if (whole == 0) fail("a number should be here");
  if (whole > 1 && text_[first] == '0') fail("a number begins with a zero");
  bool is_exact = true;
  if (skip(".")) {
    is_exact = false;
    if (digits() == 0) fail("a number ends with its point");
  }
  if (skip("eE")) {
    is_exact = false;
    skip("+-");
    if (digits() == 0) fail("a number has no exponent");
  }
  const char* const begin = text_.data() + place_;
  const char* const stop = text_.data() + end;
  const auto parse = [&](auto value) {
    if (std::from_chars(begin, stop, value).ec != std::errc()) fail("a number is out of range");
    place_ = end;
    return value;
  };
  const bool is_minus_zero = is_negative && whole == 1 && text_[first] == '0';
  if (!is_exact || is_minus_zero) return parse(double{});
  if (is_negative) return parse(std::int64_t{});
  return parse(std::uint64_t{});
}

LOCKSTEP_INLINE std::uint64_t JsonCursor::natural() {
  const char c = peek();
  if (c < '0' || c > '9') fail("a whole number should be here");
  const Number value = number();
  const auto* const natural = std::get_if<std::uint64_t>(&value);
  if (natural == nullptr) fail("a number is not whole");
  return *natural;
}

}  // namespace lockstep::detail

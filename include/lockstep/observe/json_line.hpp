// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file One JSON object on one line: what logs are made of.

#include <charconv>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <type_traits>

namespace lockstep {

namespace detail {

/// How many bytes the UTF-8 character at the front has; 0 where there is none (RFC 3629: no
/// overlong forms, no surrogates, nothing above U+10FFFF).
constexpr std::size_t utf8_size(std::string_view text) {
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

/// Appends `text` in quotation marks. Bytes that are no UTF-8, as paths may have them, become
/// U+FFFD: a reader would reject the whole line for them.
inline void append_json_string(std::string& out, std::string_view text) {
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

}  // namespace detail

/// What JSON has a word for. Characters are left out: whether one is a number or a text is not
/// said.
template <class T>
concept JsonScalar =
    std::convertible_to<T, std::string_view> || std::same_as<T, bool> || std::floating_point<T> ||
    (std::integral<T> && !std::same_as<T, char> && !std::same_as<T, wchar_t>);

/// `JsonLine().add("epoch", 3).add("loss", 0.25).text()` is `{"epoch":3,"loss":0.25}`. Members stay
/// in order; numbers are the shortest that read back as the same; what is no finite number is
/// null.
class JsonLine {
 public:
  template <JsonScalar T>
  JsonLine& add(std::string_view name, const T& value) {
    if (!members_.empty()) members_ += ',';
    detail::append_json_string(members_, name);
    members_ += ':';
    if constexpr (std::convertible_to<T, std::string_view>) {
      detail::append_json_string(members_, value);
    } else if constexpr (std::same_as<T, bool>) {
      members_ += value ? "true" : "false";
    } else {
      append_number(value);
    }
    return *this;
  }

  std::string text() const { return "{" + members_ + "}"; }

 private:
  template <class T>
  void append_number(T value) {
    if constexpr (std::floating_point<T>) {
      if (!std::isfinite(value)) {
        members_ += "null";
        return;
      }
    }
    char digits[64];
    const std::to_chars_result end = std::to_chars(digits, digits + sizeof digits, value);
    members_.append(digits, end.ptr);
  }

  std::string members_;
};

}  // namespace lockstep

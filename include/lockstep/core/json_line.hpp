// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Lines of JSON, as logs have them.

#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/text.hpp"

namespace lockstep {

namespace detail {

/// How many bytes the UTF-8 character at the front has; 0 where there is none (RFC 3629: no
/// overlong forms, no surrogates, nothing above U+10FFFF).
std::size_t utf8_size(std::string_view text);
bool is_utf8(std::string_view text);

/// Appends `text` in quotation marks. Bytes that are no UTF-8, as paths may have them, become
/// U+FFFD: a reader would reject all of it for them.
void append_json_string(std::string& out, std::string_view text);
/// Appends the shortest number that reads back as the same; `null` where it is not finite.
void append_json_number(std::string& out, float value);
void append_json_number(std::string& out, double value);

/// A value that JSON can hold. Characters are left out, because one may be a number or a text.
template <class T>
concept JsonScalar =
    std::convertible_to<T, std::string_view> || std::same_as<T, bool> || std::floating_point<T> ||
    (std::integral<T> && !std::same_as<T, char> && !std::same_as<T, wchar_t>);

}  // namespace detail

/// `JsonLine().add("epoch", 3).add("loss", 0.25).text()` is `{"epoch":3,"loss":0.25}`. Members stay
/// in order; numbers are the shortest that read back as the same; NaN and infinities are null.
class JsonLine {
 public:
  template <detail::JsonScalar T>
  JsonLine& add(std::string_view name, const T& value) {
    add_name(name);
    if constexpr (std::convertible_to<T, std::string_view>) {
      detail::append_json_string(members_, value);
    } else if constexpr (std::same_as<T, bool>) {
      members_ += value ? "true" : "false";
    } else if constexpr (std::same_as<T, float>) {
      detail::append_json_number(members_, value);
    } else if constexpr (std::floating_point<T>) {
      detail::append_json_number(members_, static_cast<double>(value));
    } else {
      detail::Word(value).append_to(members_);
    }
    return *this;
  }
  /// An object inside this one.
  JsonLine& add(std::string_view name, const JsonLine& object) {
    add_name(name);
    members_ += object.text();
    return *this;
  }
  /// Appends the members of another.
  JsonLine& add(const JsonLine& others);

  std::string text() const { return detail::text({"{", members_, "}"}); }

 private:
  void add_name(std::string_view name);

  std::string members_;
};

}  // namespace lockstep

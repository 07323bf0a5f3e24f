// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file One JSON object on one line, for logs.

#include <concepts>
#include <string>
#include <string_view>

#include "lockstep/core/json_string.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/text.hpp"

namespace lockstep {

namespace detail {

/// A value that JSON can hold. Characters are left out, because one may be a number or a text.
template <class T>
concept JsonScalar =
    std::convertible_to<T, std::string_view> || std::same_as<T, bool> || std::floating_point<T> ||
    (std::integral<T> && !std::same_as<T, char> && !std::same_as<T, wchar_t>);

/// The shortest number that reads back as the same; `null` where it is not finite.
std::string json_number(float value);
std::string json_number(double value);
std::string json_number(long double value);

}  // namespace detail

/// `JsonLine().add("epoch", 3).add("loss", 0.25).text()` is `{"epoch":3,"loss":0.25}`. Members stay
/// in order; numbers are the shortest that read back as the same; NaN and infinities are null.
class JsonLine {
 public:
  template <detail::JsonScalar T>
  JsonLine& add(std::string_view name, const T& value) {
    if constexpr (std::convertible_to<T, std::string_view>) {
      add_name(name);
      detail::append_json_string(members_, value);
    } else if constexpr (std::same_as<T, bool>) {
      add_word(name, value ? "true" : "false");
    } else if constexpr (std::floating_point<T>) {
      add_word(name, detail::json_number(value));
    } else {
      add_word(name, value);
    }
    return *this;
  }

  /// An object inside this one.
  JsonLine& add(std::string_view name, const JsonLine& object) {
    add_word(name, object.text());
    return *this;
  }

  /// Appends the members of another.
  JsonLine& add(const JsonLine& others);

  std::string text() const { return detail::text({"{", members_, "}"}); }

 private:
  void add_name(std::string_view name);
  void add_word(std::string_view name, detail::Word value);

  std::string members_;
};

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/observe/json_line.ipp"
#endif

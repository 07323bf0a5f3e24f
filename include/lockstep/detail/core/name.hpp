// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Names as template arguments, keys such as `"fc1.weight"_p`, and patterns of names.

#include "lockstep/detail/core/hash.hpp"

namespace lockstep {

/// A text as a template argument: `Parameter<"w", float, 4>`. `N` counts the terminating zero.
template <std::size_t N>
struct Name {
  char text[N]{};

  constexpr Name() = default;
  constexpr Name(const char (&literal)[N]) {  // implicit: a literal is a name
    for (std::size_t i = 0; i < N; ++i) text[i] = literal[i];
  }

  constexpr std::string_view view() const { return {text, N - 1}; }
};

namespace detail {

/// A name as a type, for lookup at compile time.
template <Name Text>
struct Key {
  static constexpr std::string_view name = Text.view();
};

template <class T>
concept NameKey = requires {
  { T::name } -> std::convertible_to<std::string_view>;
} && std::is_empty_v<T>;

constexpr std::size_t decimal_digits(std::size_t n) {
  std::size_t digits = 1;
  while (n >= 10) {
    n /= 10;
    ++digits;
  }
  return digits;
}

/// Writes `n` in decimal and returns the end.
constexpr char* write_decimal(char* out, std::size_t n) {
  char* const end = out + decimal_digits(n);
  for (char* digit = end; digit != out; n /= 10) *--digit = static_cast<char>('0' + n % 10);
  return end;
}

/// `a.b`, the name of b in the scope a.
template <NameKey Scope, NameKey Inner>
constexpr auto operator/(Scope, Inner) {
  constexpr auto joined = [] {
    Name<Scope::name.size() + Inner::name.size() + 2> name;
    char* out = name.text;
    for (char c : Scope::name) *out++ = c;
    *out++ = '.';
    for (char c : Inner::name) *out++ = c;
    return name;
  }();
  return Key<joined>{};
}

template <std::size_t Index>
inline constexpr auto decimal_name = [] {
  Name<decimal_digits(Index) + 1> name;
  write_decimal(name.text, Index);
  return name;
}();

/// Does a name match a pattern, in which `*` stands for any characters or none? (g++ 12 does not
/// take `string_view::find` for a constant under the undefined-behaviour sanitizer.)
constexpr bool matches(std::string_view pattern, std::string_view name) {
  std::size_t p = 0;
  std::size_t n = 0;
  std::size_t star = pattern.size();  // the last star, if there is one
  std::size_t after = 0;              // where the name goes on after the star's characters
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      after = n;
    } else if (p < pattern.size() && pattern[p] == name[n]) {
      ++p;
      ++n;
    } else if (star < pattern.size()) {
      p = star + 1;  // the star takes one more character
      n = ++after;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

/// A list of patterns; a name must match one.
template <Name... Patterns>
struct NamePatterns {
  static constexpr std::array<std::string_view, sizeof...(Patterns)> patterns{Patterns.view()...};

  static constexpr bool match([[maybe_unused]] std::string_view name) {
    return (matches(Patterns.view(), name) || ...);
  }
  static constexpr void fingerprint_patterns(Hash& hash) {
    hash.number(sizeof...(Patterns));
    (hash.text(Patterns.view()), ...);
  }
};

}  // namespace detail

/// One block of a `Repeat`: `"blocks"_p / at<3> / "attn.weight"_p`.
template <std::size_t Index>
inline constexpr detail::Key<detail::decimal_name<Index>> at{};

inline namespace literals {

/// The key of a parameter or buffer. Not `consteval`, which clang 14 leaves undefined in templates.
template <Name Text>
constexpr detail::Key<Text> operator""_p() {
  return {};
}

}  // namespace literals

}  // namespace lockstep

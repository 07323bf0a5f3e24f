// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Patterns of names, such as `embed.*`, as template arguments.

#include <array>
#include <cstddef>
#include <string_view>

#include "lockstep/core/hash.hpp"
#include "lockstep/core/name.hpp"

namespace lockstep::detail {

/// Does a name match a pattern, in which `*` stands for any characters or none? (Written out:
/// under the undefined-behaviour sanitizer g++ 12 does not take `string_view::find` for a
/// constant.)
constexpr bool matches(std::string_view pattern, std::string_view name) {
  std::size_t p = 0;
  std::size_t n = 0;
  std::size_t star = pattern.size();  // the latest star, if there is one
  std::size_t after = 0;              // the characters before it are matched or skipped
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      after = n;
    } else if (p < pattern.size() && pattern[p] == name[n]) {
      ++p;
      ++n;
    } else if (star < pattern.size()) {
      p = star + 1;  // the star stands for one character more
      n = ++after;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

/// Patterns of which a name must match one.
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

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Numbers as people read them, whatever the locale.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>

namespace lockstep {

inline std::string fixed_text(double value, int decimals) {
  char digits[400];  // the largest double has 309 before the point
  const auto end =
      std::to_chars(digits, digits + sizeof digits, value, std::chars_format::fixed, decimals);
  return {digits, end.ptr};
}

/// A loss or a score: `0.4123`, and `3.100e-05` where four decimals would say too little.
inline std::string value_text(double value) {
  const double size = std::abs(value);
  if (!(size < 1e5) || (size < 1e-3 && size > 0)) {
    char digits[32];
    const auto end =
        std::to_chars(digits, digits + sizeof digits, value, std::chars_format::scientific, 3);
    return {digits, end.ptr};
  }
  return fixed_text(value, 4);
}

/// A rate: `54321`, and `3.2` where that is more than nothing.
inline std::string rate_text(double value) { return fixed_text(value, value < 100 ? 1 : 0); }

/// A time by the second: `0:12`, `59:59`, `1:02:03`.
inline std::string clock_text(double seconds) {
  if (!(seconds < 1e9)) return "?";
  const auto total = static_cast<std::uint64_t>(std::llround(std::max(seconds, 0.0)));
  const auto two_digits = [](std::uint64_t n) { return std::to_string(100 + n).substr(1); };
  const std::uint64_t minutes = total / 60;
  std::string text = minutes < 60 ? std::to_string(minutes)
                                  : std::to_string(minutes / 60) + ":" + two_digits(minutes % 60);
  return text + ":" + two_digits(total % 60);
}

/// How long something took: `12.3 s`, above a minute by the second.
inline std::string duration_text(double seconds) {
  return seconds < 59.95 ? fixed_text(seconds, 1) + " s" : clock_text(seconds);
}

}  // namespace lockstep

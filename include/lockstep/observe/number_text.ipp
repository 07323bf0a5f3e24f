// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `number_text.hpp`.

#include <charconv>
#include <cmath>
#include <cstdint>

#include "lockstep/core/text.hpp"
#include "lockstep/observe/number_text.hpp"

namespace lockstep {

LOCKSTEP_INLINE std::string fixed_text(double value, int decimals) {
  char digits[400];  // the largest double has 309 before the point
  const auto end =
      std::to_chars(digits, digits + sizeof digits, value, std::chars_format::fixed, decimals);
  return {digits, end.ptr};
}

LOCKSTEP_INLINE std::string value_text(double value) {
  const double size = std::abs(value);
  if (!(size < 1e5) || (size < 1e-3 && size > 0)) {
    char digits[32];
    const auto end =
        std::to_chars(digits, digits + sizeof digits, value, std::chars_format::scientific, 3);
    return {digits, end.ptr};
  }
  return fixed_text(value, 4);
}

namespace detail {

LOCKSTEP_INLINE std::string rate_text(double value) {
  return fixed_text(value, value < 100 ? 1 : 0);
}

LOCKSTEP_INLINE std::string clock_text(double seconds) {
  if (!(seconds < 1e9)) return "?";
  const auto total = static_cast<std::uint64_t>(seconds > 0 ? std::llround(seconds) : 0);
  const std::uint64_t minutes = total / 60;
  const std::string rest = detail::text({100 + total % 60}).substr(1);
  if (minutes < 60) return detail::text({minutes, ":", rest});
  return detail::text({minutes / 60, ":", detail::text({100 + minutes % 60}).substr(1), ":", rest});
}

LOCKSTEP_INLINE std::string duration_text(double seconds) {
  return seconds < 59.95 ? fixed_text(seconds, 1) + " s" : clock_text(seconds);
}

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `parse.hpp`.

#include <charconv>
#include <cmath>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/parse.hpp"

namespace lockstep::detail {

[[noreturn]] LOCKSTEP_INLINE void fail_value(std::string_view name, std::string_view value,
                                             std::string_view advice) {
  fail("launch", {name, " is '", value, "'"}, advice);
}

LOCKSTEP_INLINE std::size_t parse_number(std::string_view name, std::string_view text) {
  std::size_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) {
    fail_value(name, text, "give it a number, in digits only");
  }
  return number;
}

LOCKSTEP_INLINE std::uint16_t parse_port(std::string_view name, std::string_view text) {
  const std::size_t port = parse_number(name, text);
  if (port == 0 || port > 65535) fail_value(name, text, "give it a port, from 1 to 65535");
  return static_cast<std::uint16_t>(port);
}

LOCKSTEP_INLINE std::chrono::milliseconds parse_seconds(std::string_view name,
                                                        std::string_view text) {
  double seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc{} || end != text.data() + text.size() || !(seconds > 0) || seconds > 1e9) {
    fail_value(name, text, "give it a number of seconds above 0");
  }
  return std::chrono::milliseconds(std::llround(std::ceil(seconds * 1000)));
}

LOCKSTEP_INLINE Endpoint parse_endpoint(std::string_view name, std::string_view text) {
  const std::size_t colon = text.rfind(':');
  std::string_view host = text.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  if (colon == std::string_view::npos || host.empty() ||
      (!bracketed && host.find(':') != std::string_view::npos)) {
    fail_value(name, text, "give it as host:port, IPv6 addresses in brackets");
  }
  return {host == "localhost" ? "127.0.0.1" : std::string(host),
          parse_port(name, text.substr(colon + 1))};
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Numbers, durations and addresses out of variables and options, or a sentence about what is
/// wrong with them.

#include <charconv>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/core/error.hpp"

namespace lockstep {

/// `name` is what the text was the value of: a variable or an option.
inline std::size_t parse_number(std::string_view name, std::string_view text) {
  std::size_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw Error("launch", std::string(name) + " is '" + std::string(text) + "'",
                "give it a number, in digits only");
  }
  return number;
}

inline std::uint16_t parse_port(std::string_view name, std::string_view text) {
  const std::size_t port = parse_number(name, text);
  if (port == 0 || port > 65535) {
    throw Error("launch", std::string(name) + " is '" + std::string(text) + "'",
                "give it a port, from 1 to 65535");
  }
  return static_cast<std::uint16_t>(port);
}

/// A time limit in seconds, with or without a fraction.
inline std::chrono::milliseconds parse_seconds(std::string_view name, std::string_view text) {
  double seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc{} || end != text.data() + text.size() || !(seconds > 0) || seconds > 1e9) {
    throw Error("launch", std::string(name) + " is '" + std::string(text) + "'",
                "give it a number of seconds above 0");
  }
  return std::chrono::milliseconds(std::llround(std::ceil(seconds * 1000)));
}

struct Endpoint {
  std::string host;
  std::uint16_t port = 0;
};

/// `host:port`, `127.0.0.1:29500`, `[::1]:29500`. `localhost` becomes 127.0.0.1, because ranks must
/// not differ in which of its addresses they mean.
inline Endpoint parse_endpoint(std::string_view name, std::string_view text) {
  const std::size_t colon = text.rfind(':');
  std::string_view host = text.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  if (colon == std::string_view::npos || host.empty() ||
      (!bracketed && host.find(':') != std::string_view::npos)) {
    throw Error("launch", std::string(name) + " is '" + std::string(text) + "'",
                "give it as host:port, IPv6 addresses in brackets");
  }
  return {host == "localhost" ? "127.0.0.1" : std::string(host),
          parse_port(name, text.substr(colon + 1))};
}

}  // namespace lockstep

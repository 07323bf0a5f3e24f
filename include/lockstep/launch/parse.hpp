// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Reads numbers, durations and addresses from variables and options, or throws.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// `name` is the variable or option that has this text.
std::size_t parse_number(std::string_view name, std::string_view text);

std::uint16_t parse_port(std::string_view name, std::string_view text);

/// A time limit in seconds, with or without a fraction.
std::chrono::milliseconds parse_seconds(std::string_view name, std::string_view text);

struct Endpoint {
  std::string host;
  std::uint16_t port = 0;
};

/// `host:port`, `127.0.0.1:29500`, `[::1]:29500`. `localhost` becomes 127.0.0.1, because ranks must
/// not differ in which of its addresses they mean.
Endpoint parse_endpoint(std::string_view name, std::string_view text);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/parse.ipp"
#endif

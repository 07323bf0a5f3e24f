// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A rank's description of its call, by which ranks notice when they disagree.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

enum class CollectiveKind : std::uint32_t {
  barrier,
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  gather,
  scatter,
  reduce_scatter,
  all_to_all,
  send,
  receive,
  allocate,
  new_group,
  replay,
  capture,
};

inline constexpr std::string_view collective_names[] = {
    "barrier", "all_reduce", "reduce",         "broadcast",  "all_gather",
    "gather",  "scatter",    "reduce_scatter", "all_to_all", "send",
    "receive", "allocate",   "new_group",      "replay",     "capture"};

constexpr std::string_view collective_name(CollectiveKind kind) {
  return collective_names[static_cast<std::size_t>(kind)];
}

/// One rank's description of a call. It travels between ranks as it is. All ranks of a collective
/// must give equal descriptions; a sender and its receiver give matching ones.
struct Call {
  CollectiveKind kind = CollectiveKind::barrier;
  ElementKind element = ElementKind::unsupported;
  bool staged = false;     // the memory is not visible to other ranks
  std::uint16_t root = 0;  // or the other rank of a message
  std::uint64_t count = 0;
  std::array<char, 24> operation{};  // the reduce operation's name

  friend bool operator==(const Call&, const Call&) = default;

  constexpr Call& with(std::string_view name) {
    name.copy(operation.data(), operation.size() - 1);
    return *this;
  }

  /// Do a message that is sent and one that is received have the same type and length?
  constexpr bool carries_the_same_as(const Call& other) const {
    return element == other.element && count == other.count;
  }

  /// The call as errors name it: `all_reduce(sum of 100 float)`.
  std::string text() const;
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/comm/call.ipp"
#endif

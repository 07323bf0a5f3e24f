// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a rank says about the collective it is in, so that ranks can notice when they
/// disagree.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/core/element.hpp"

namespace lockstep {

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
  allocate,
  send,
  new_group,
  replay,
  capture,
};

constexpr std::string_view collective_name(CollectiveKind kind) {
  constexpr std::string_view names[] = {
      "barrier",        "all_reduce", "reduce",   "broadcast", "all_gather", "gather", "scatter",
      "reduce_scatter", "all_to_all", "allocate", "send",      "new_group",  "replay", "capture"};
  return names[static_cast<std::size_t>(kind)];
}

/// One rank's view of a collective call. It lies in shared memory as it is, and all of it must be
/// equal on all ranks.
struct Call {
  CollectiveKind kind = CollectiveKind::barrier;
  ElementKind element = ElementKind::unsupported;
  bool staged = false;  // of memory that other ranks cannot see
  std::uint16_t root = 0;
  std::uint64_t count = 0;
  std::array<char, 24> operation{};  // the reduce operation's name

  friend bool operator==(const Call&, const Call&) = default;

  constexpr Call& with(std::string_view name) {
    name.copy(operation.data(), operation.size() - 1);
    return *this;
  }

  /// `all_reduce(sum of 100 float)`
  std::string text() const {
    std::string out(collective_name(kind));
    if (kind == CollectiveKind::barrier || kind == CollectiveKind::capture) return out + "()";
    if (kind == CollectiveKind::replay) return out + " of a captured step";
    if (kind == CollectiveKind::new_group) {
      return out + "(" + std::to_string(count) + (count == 1 ? " rank)" : " ranks)");
    }
    out += "(";
    if (operation[0] != '\0') out += std::string(operation.data()) + " of ";
    out += std::to_string(count) + " " + std::string(element_name(element));
    if (kind == CollectiveKind::send) return out + ", to rank " + std::to_string(root) + ")";
    if (kind == CollectiveKind::reduce || kind == CollectiveKind::broadcast ||
        kind == CollectiveKind::gather || kind == CollectiveKind::scatter) {
      out += ", root " + std::to_string(root);
    }
    return out + (staged ? ", memory of its own)" : ")");
  }
};

template <class T>
constexpr Call make_call(CollectiveKind kind, std::size_t count, bool staged, std::size_t root = 0,
                         std::string_view operation = "") {
  Call call;
  call.kind = kind;
  call.element = element_kind<std::remove_const_t<T>>();
  call.staged = staged;
  call.root = static_cast<std::uint16_t>(root);
  call.count = count;
  return call.with(operation);
}

}  // namespace lockstep

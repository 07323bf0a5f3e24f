// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A rank's place when a communicator is divided into groups.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "lockstep/comm/call.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

/// One rank's place in a division of all ranks. `group` tells groups of one division apart.
struct GroupPlace {
  std::size_t group = dynamic;  // `dynamic`: this rank is in no group
  Rank rank{};                  // in its group
  std::vector<Rank> members{};  // the parent's ranks that are in the group, in its order
  std::uint64_t division = 0;   // a hash over the whole division, which all ranks must agree on
  std::size_t divided = 0;      // ranks in all groups together

  bool is_member() const { return group != dynamic; }
  Rank leader() const { return members.front(); }
  WorldSize world() const { return WorldSize{members.size()}; }
};

/// The call by which ranks agree on a division before they make its groups.
inline Call division_call(const GroupPlace& place) {
  Call call;
  call.kind = CollectiveKind::new_group;
  call.count = place.divided;
  char text[17] = {};
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(place.division));
  return call.with(text);
}

}  // namespace lockstep::detail

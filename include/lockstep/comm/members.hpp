// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Who is in a group: what every backend asks before it makes one.

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep {

/// The place of `parent`'s rank among `members`; none where it is not listed. A list that cannot be
/// a group is an error.
template <class Parent>
std::optional<Rank> place_among(const std::vector<Rank>& members, const Parent& parent) {
  const auto fault = [&](const char* problem) {
    return Error("new_group", problem, "list ranks of the parent, each once", parent.rank());
  };
  if (members.empty()) throw fault("the list is empty");
  for (const Rank& member : members) {
    if (member.value() >= parent.world_size().value()) throw fault("a rank is outside the world");
    if (std::count(members.begin(), members.end(), member) != 1)
      throw fault("a rank is listed twice");
  }
  const auto found = std::find(members.begin(), members.end(), parent.rank());
  if (found == members.end()) return std::nullopt;
  return Rank{static_cast<std::size_t>(found - members.begin())};
}

template <Topology T, class Parent>
void require_same_world(const T& topology, const Parent& parent) {
  if (topology.world_size() == parent.world_size()) return;
  throw Error("join_groups",
              "the topology is for " + std::to_string(topology.world_size().value()) +
                  " ranks and the communicator has " + std::to_string(parent.world_size().value()),
              "give them the same world", parent.rank());
}

/// The group of `topology` that this rank is in, with `make(members)` for each. Every rank takes
/// part in making every group, in the same order: it cannot be done wrong.
template <Topology T, class Parent, class Make>
auto join_one_by_one(const T& topology, const Parent& parent, const Make& make) {
  require_same_world(topology, parent);
  decltype(make(std::vector<Rank>())) own;
  for (std::size_t g = 0; g < topology.group_world_size(); ++g) {
    std::vector<Rank> members;
    for (Rank rank : topology.members(GroupRank{g})) members.push_back(rank);
    if (auto group = make(members)) own.emplace(std::move(*group));
  }
  return std::move(*own);
}

}  // namespace lockstep

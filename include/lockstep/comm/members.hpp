// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Who is in a group: what lists of ranks and topologies must be like.

#include <algorithm>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep {

/// Throws unless the list holds ranks of `parent`, each once.
template <Communicator C>
void check_members(const std::vector<Rank>& members, const C& parent) {
  const auto fault = [&](const char* problem) {
    return Error("new_group", problem, "list ranks of the parent, each once", parent.rank());
  };
  if (members.empty()) throw fault("the list is empty");
  for (const Rank& member : members) {
    if (member.value() >= parent.world_size().value()) throw fault("a rank is outside the world");
    if (std::count(members.begin(), members.end(), member) != 1)
      throw fault("a rank is listed twice");
  }
}

/// Throws unless the topology is one of `parent`'s ranks.
template <Topology T, Communicator C>
void check_topology(const T& topology, const C& parent) {
  if (topology.world_size() == parent.world_size()) return;
  throw Error("join_groups",
              "the topology is for " + std::to_string(topology.world_size().value()) +
                  " ranks and the communicator has " + std::to_string(parent.world_size().value()),
              "give them the same world", parent.rank());
}

}  // namespace lockstep

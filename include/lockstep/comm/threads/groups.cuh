// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Communicators of some of the ranks of a process, from lists or from topologies.

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/threads/communicator.cuh"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep {

/// A communicator of the listed ranks, in the listed order; nothing on the others. **Ranks** all of
/// `parent`, members or not, with the same list. **Host** blocks until all have come.
template <std::size_t Ranks>
std::optional<ThreadCommunicator<dynamic>> new_group(ThreadCommunicator<Ranks>& parent,
                                                     const std::vector<Rank>& members) {
  const auto fault = [&](const char* problem) {
    return Error("new_group", problem, "list ranks of the parent, each once", parent.rank());
  };
  if (members.empty()) throw fault("the list is empty");
  for (const Rank& member : members) {
    if (member.value() >= parent.world_size().value()) throw fault("a rank is outside the world");
    if (std::count(members.begin(), members.end(), member) != 1)
      throw fault("a rank is listed twice");
  }
  auto world = parent.make_group_world(members);
  std::optional<ThreadCommunicator<dynamic>> group;
  if (world) {
    const auto place = std::find(members.begin(), members.end(), parent.rank());
    group.emplace(std::move(world), Rank{static_cast<std::size_t>(place - members.begin())},
                  parent.shared_gpu(), parent.timeout());
  }
  return group;
}

/// The group of `topology` that this rank is in. Every rank takes part in making every group, in
/// the same order: it cannot be done wrong. **Ranks** all of `parent`. **Host** blocks.
template <Topology T, std::size_t Ranks>
ThreadCommunicator<dynamic> join_groups(ThreadCommunicator<Ranks>& parent, const T& topology = {}) {
  if (topology.world_size() != parent.world_size()) {
    throw Error("join_groups",
                "the topology is for " + std::to_string(topology.world_size().value()) +
                    " ranks and the communicator has " +
                    std::to_string(parent.world_size().value()),
                "give them the same world", parent.rank());
  }
  std::optional<ThreadCommunicator<dynamic>> own;
  for (std::size_t g = 0; g < topology.group_world_size(); ++g) {
    std::vector<Rank> members;
    for (Rank rank : topology.members(GroupRank{g})) members.push_back(rank);
    if (auto group = new_group(parent, members)) own.emplace(std::move(*group));
  }
  return std::move(*own);
}

}  // namespace lockstep

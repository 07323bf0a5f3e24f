// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Communicators of some of the ranks, from lists or from topologies.

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/members.hpp"
#include "lockstep/comm/objects.hpp"
#include "lockstep/comm/shm/communicator.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep {

/// A communicator of the listed ranks, in the listed order; nothing on the others. **Ranks** all of
/// `parent`, members or not, with the same list. **Host** blocks until the members have met.
template <std::size_t Ranks, class Who>
std::optional<ShmCommunicator<dynamic>> new_group(ShmCommunicator<Ranks, Who>& parent,
                                                  const std::vector<Rank>& members) {
  check_members(members, parent);
  const WorldSize world{members.size()};
  const auto place = std::find(members.begin(), members.end(), parent.rank());
  shm::MemoryFile file;
  std::string address;
  if (parent.rank() == members.front()) {
    file = shm::Engine::make_file(world);
    address = shm::Engine::address(file);
  }
  broadcast_object(parent, address, members.front());
  std::optional<ShmCommunicator<dynamic>> group;
  if (place != members.end()) {
    const Rank rank{static_cast<std::size_t>(place - members.begin())};
    if (rank != Rank{0}) file = shm::Engine::open(address);
    group.emplace(rank, world, std::move(file), parent.timeout());
  }
  parent.barrier();  // the leader's file stays open until everybody has opened it
  return group;
}

/// The group of `topology` that this rank is in. Every rank takes part in making every group, in
/// the same order: it cannot be done wrong. **Ranks** all of `parent`. **Host** blocks.
template <Topology T, std::size_t Ranks, class Who>
ShmCommunicator<dynamic> join_groups(ShmCommunicator<Ranks, Who>& parent, const T& topology = {}) {
  check_topology(topology, parent);
  std::optional<ShmCommunicator<dynamic>> own;
  for (std::size_t g = 0; g < topology.group_world_size(); ++g) {
    std::vector<Rank> members;
    for (Rank rank : topology.members(GroupRank{g})) members.push_back(rank);
    if (auto group = new_group(parent, members)) own.emplace(std::move(*group));
  }
  return std::move(*own);
}

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Communicators of some of the ranks, from lists or from topologies.

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
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
  const std::optional<Rank> place = place_among(members, parent);
  const WorldSize world{members.size()};
  shm::MemoryFile file;
  std::string address;
  if (parent.rank() == members.front()) {
    file = shm::Engine::make_file(world);
    address = shm::Engine::address(file);
  }
  broadcast_object(parent, address, members.front());
  std::optional<ShmCommunicator<dynamic>> group;
  if (place) {
    if (*place != Rank{0}) file = shm::Engine::open(address);
    group.emplace(*place, world, std::move(file), parent.timeout());
  }
  parent.barrier();  // the leader's file stays open until everybody has opened it
  return group;
}

/// The group of `topology` that this rank is in. Every rank takes part in making every group, in
/// the same order: it cannot be done wrong. **Ranks** all of `parent`. **Host** blocks.
template <Topology T, std::size_t Ranks, class Who>
ShmCommunicator<dynamic> join_groups(ShmCommunicator<Ranks, Who>& parent, const T& topology = {}) {
  return join_one_by_one(topology, parent, [&](const std::vector<Rank>& members) {
    return new_group(parent, members);
  });
}

}  // namespace lockstep

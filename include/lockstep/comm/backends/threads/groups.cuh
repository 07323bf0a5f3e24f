// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Communicators of some of the ranks of a process, from lists or from topologies.

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/members.hpp"
#include "lockstep/comm/backends/threads/communicator.cuh"
#include "lockstep/core/strong.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep {

/// A communicator of the listed ranks, in the listed order; nothing on the others. **Ranks** all of
/// `parent`, members or not, with the same list. **Host** blocks until all have come.
template <std::size_t Ranks>
std::optional<ThreadCommunicator<dynamic>> new_group(ThreadCommunicator<Ranks>& parent,
                                                     const std::vector<Rank>& members) {
  const std::optional<Rank> place = place_among(members, parent);
  auto world = parent.make_group_world(members);
  std::optional<ThreadCommunicator<dynamic>> group;
  if (place) group.emplace(std::move(world), *place, parent.shared_gpu(), parent.timeout());
  return group;
}

/// The group of `topology` that this rank is in. Every rank takes part in making every group, in
/// the same order: it cannot be done wrong. **Ranks** all of `parent`. **Host** blocks.
template <Topology T, std::size_t Ranks>
ThreadCommunicator<dynamic> join_groups(ThreadCommunicator<Ranks>& parent, const T& topology = {}) {
  return join_one_by_one(topology, parent, [&](const std::vector<Rank>& members) {
    return new_group(parent, members);
  });
}

}  // namespace lockstep

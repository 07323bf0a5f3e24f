// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gloo communicators of some of the ranks, from lists or from topologies. They share their
/// parent's thread for sockets.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/backends/gloo/communicator.hpp"
#include "lockstep/comm/members.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep {

namespace over_gloo {

/// What all ranks must agree about before they make a group: every rank in it, and their order.
inline Call group_call(std::size_t ranks, std::uint64_t hash) {
  Call call;
  call.kind = CollectiveKind::new_group;
  call.count = ranks;
  char text[17] = {};
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return call.with(text);
}

template <std::size_t Ranks>
GlooCommunicator<dynamic> join_group(GlooCommunicator<Ranks>& parent, const std::string& name,
                                     Rank rank, WorldSize world) {
  Seat seat = parent.engine().seat();
  seat.rank = rank;
  seat.world = world;
  seat.name = name;
  seat.timeout = parent.timeout();
  return GlooCommunicator<dynamic>(seat);
}

}  // namespace over_gloo

/// A communicator of the listed ranks, in the listed order; nothing on the others. **Ranks** all of
/// `parent`, members or not, with the same list. **Host** blocks until the members have met.
template <std::size_t Ranks>
std::optional<GlooCommunicator<dynamic>> new_group(GlooCommunicator<Ranks>& parent,
                                                   const std::vector<Rank>& members) {
  const std::optional<Rank> place = place_among(members, parent);
  Hash hash;
  for (const Rank& member : members) hash.number(member.value());
  parent.agree(over_gloo::group_call(members.size(), hash.value()));
  const std::string name = parent.engine().next_group_name();
  if (!place) return std::nullopt;
  return over_gloo::join_group(parent, name, *place, WorldSize{members.size()});
}

/// The group of `topology` that this rank is in. All groups are made at once. **Ranks** all of
/// `parent`. **Host** blocks.
template <Topology T, std::size_t Ranks>
GlooCommunicator<dynamic> join_groups(GlooCommunicator<Ranks>& parent, const T& topology = {}) {
  require_same_world(topology, parent);
  Hash hash;
  for (std::size_t r = 0; r < parent.world_size().value(); ++r) {
    hash.number(topology.group_rank(Rank{r}).value());
    hash.number(topology.local_group_rank(Rank{r}).value());
  }
  parent.agree(over_gloo::group_call(parent.world_size().value(), hash.value()));
  const GroupRank group = topology.group_rank(parent.rank());
  const std::string name = parent.engine().next_group_name() + "." + std::to_string(group.value());
  return over_gloo::join_group(parent, name, Rank{topology.local_group_rank(parent.rank()).value()},
                               WorldSize{topology.group_size(group)});
}

}  // namespace lockstep

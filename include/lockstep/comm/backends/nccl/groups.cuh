// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file NCCL communicators of some of the ranks, from lists or from topologies. They share their
/// parent's GPU and compute stream.

#include <nccl.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/members.hpp"
#include "lockstep/comm/backends/nccl/communicator.cuh"
#include "lockstep/core/strong.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep {

namespace nccl {

/// Where a rank goes in a split: nowhere without a colour.
struct Place {
  int colour = NCCL_SPLIT_NOCOLOR;
  Rank rank;
  WorldSize world;
};

/// Splits the parent. **Ranks** all of it. **Host** blocks until NCCL is done.
template <std::size_t Ranks>
std::optional<NcclCommunicator<dynamic>> split(NcclCommunicator<Ranks>& parent, const Call& call,
                                               const Place& place) {
  Engine& engine = parent.engine();
  const std::string name = engine.next_group_name() + "." + std::to_string(place.colour);
  engine.post(call, [&] {
    engine.split_result() = nullptr;
    engine.link().nccl("ncclCommSplit", [&](ncclComm_t comm) {
      return ncclCommSplit(comm, place.colour, static_cast<int>(place.rank.value()),
                           &engine.split_result(), nullptr);
    });
  });
  if (place.colour == NCCL_SPLIT_NOCOLOR) return std::nullopt;
  auto group = std::make_shared<Engine>(Seat{place.rank, place.world, name, engine.seat().gpu,
                                             engine.seat().store, engine.timeout()});
  group->connect([&](ncclComm_t* comm) {
    *comm = std::exchange(engine.split_result(), nullptr);
    return ncclSuccess;
  });
  return std::optional<NcclCommunicator<dynamic>>(std::in_place, std::move(group));
}

/// What all ranks must agree about: how many ranks are in groups, and who leads the first.
inline Call split_call(std::size_t ranks, Rank leader) {
  Call call;
  call.kind = CollectiveKind::new_group;
  call.count = ranks;
  call.root = static_cast<std::uint16_t>(leader.value());
  return call;
}

}  // namespace nccl

/// A communicator of the listed ranks, in the listed order; nothing on the others. **Ranks** all of
/// `parent`, members or not, with the same list. **Host** blocks until the members have met.
template <std::size_t Ranks>
std::optional<NcclCommunicator<dynamic>> new_group(NcclCommunicator<Ranks>& parent,
                                                   const std::vector<Rank>& members) {
  nccl::Place place;
  if (const auto rank = place_among(members, parent)) place = {0, *rank, WorldSize{members.size()}};
  return nccl::split(parent, nccl::split_call(members.size(), members.front()), place);
}

/// The group of `topology` that this rank is in. All groups are made at once. **Ranks** all of
/// `parent`. **Host** blocks.
template <Topology T, std::size_t Ranks>
NcclCommunicator<dynamic> join_groups(NcclCommunicator<Ranks>& parent, const T& topology = {}) {
  require_same_world(topology, parent);
  const GroupRank group = topology.group_rank(parent.rank());
  const nccl::Place place{static_cast<int>(group.value()),
                          Rank{topology.local_group_rank(parent.rank()).value()},
                          WorldSize{topology.group_size(group)}};
  const Rank leader = topology.member(GroupRank{0}, LocalGroupRank{0});
  auto own = nccl::split(parent, nccl::split_call(parent.world_size().value(), leader), place);
  return std::move(*own);
}

}  // namespace lockstep

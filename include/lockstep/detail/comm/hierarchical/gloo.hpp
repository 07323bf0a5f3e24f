// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Shared memory inside hosts and Gloo between them.

#include "lockstep/detail/comm/gloo/communicator.hpp"
#include "lockstep/detail/comm/hierarchical/communicator.hpp"
#include "lockstep/detail/comm/shm/communicator.hpp"

namespace lockstep {

/// Creates the communicator of a job whose hosts (the ranks discover them) have equally many ranks;
/// `name` distinguishes several of one job. **Ranks** all. **Host** blocks until all have joined.
inline auto make_hierarchical_communicator(const Membership& member, Store& store,
                                           const std::string& name = "world") {
  const std::string known =
      "hierarchy/" + detail::numbered_rendezvous(store, member.rank, "hierarchy", name);
  detail::Hosts hosts = detail::discover_hosts(member, store, "lockstep/" + known + "/");
  hosts.check_even(member.rank);
  GlooCommunicator<> flat = make_gloo_communicator(member, store, known);
  GlooCommunicator<> between =
      join_groups(flat, Groups<World<dynamic>>(member.world, hosts.columns()));

  const std::size_t host = hosts.host(member.rank);
  Membership local = detail::in_group(member, Rank{hosts.local_rank(member.rank)},
                                      WorldSize{hosts.ranks(host).size()});
  local.local_rank = local.rank.value();
  local.local_world = local.world.value();
  local.timeout += detail::inside_margin;
  ShmCommunicator<> inside =
      make_shm_communicator(local, store, known + "/" + std::to_string(host));

  using Both = detail::HierarchyStages<ShmCommunicator<>, GlooCommunicator<>>;
  return HierarchicalCommunicator<ShmCommunicator<>, GlooCommunicator<>>(std::make_unique<Both>(
      std::move(hosts), std::move(inside), std::move(between), std::move(flat)));
}

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Shared memory inside hosts and a network between them.

#include "lockstep/detail/comm/hierarchical/communicator.hpp"
#include "lockstep/detail/comm/shm/communicator.hpp"

namespace lockstep::detail {

/// Creates the communicator of a job whose hosts (the ranks discover them) have equally many ranks.
/// `make_network(member, store, name)` joins all ranks; `name` distinguishes several of one job.
/// **Ranks** all. **Host** blocks until all have joined.
template <class MakeNetwork>
auto make_shm_hierarchy(const Membership& member, Store& store, const std::string& name,
                        const MakeNetwork& make_network) {
  using Network = decltype(make_network(member, store, name));
  const std::string known =
      "hierarchy/" + numbered_rendezvous(store, member.rank, "hierarchy", name);
  Hosts hosts = discover_hosts(member, store, "lockstep/" + known + "/");
  hosts.check_even(member.rank);
  Network flat = make_network(member, store, known);
  Network between = join_groups(flat, Groups<World<dynamic>>(member.world, hosts.columns()));

  const std::size_t host = hosts.host(member.rank);
  Membership local =
      in_group(member, Rank{hosts.local_rank(member.rank)}, WorldSize{hosts.ranks(host).size()});
  local.local_rank = local.rank.value();
  local.local_world = local.world.value();
  local.timeout += inside_margin;
  ShmCommunicator<> inside =
      make_shm_communicator(local, store, known + "/" + std::to_string(host));

  using Both = HierarchyStages<ShmCommunicator<>, Network>;
  return HierarchicalCommunicator<ShmCommunicator<>, Network>(std::make_unique<Both>(
      std::move(hosts), std::move(inside), std::move(between), std::move(flat)));
}

}  // namespace lockstep::detail

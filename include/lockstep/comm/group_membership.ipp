// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `group_membership.hpp`.

#include "lockstep/comm/adapters/hierarchical/hosts.hpp"
#include "lockstep/comm/group_membership.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/launch/numbered_meeting.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE Membership membership_in_group(const Membership& member, Store& store,
                                               const GroupPlace& place, const std::string& name) {
  Membership own = member;
  own.rank = place.rank;
  own.world = place.world();
  const Hosts hosts = discover_hosts(
      own, store,
      text({"lockstep/groups/", numbered_meeting(store, own.rank, "groups", name), "/"}));
  own.local_world = hosts.ranks(hosts.host(own.rank)).size();
  return own;
}

LOCKSTEP_INLINE std::string group_name(const std::vector<Rank>& members) {
  std::string name = "group of";
  for (const Rank member : members) name += text({" ", member});
  return name;
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Groups of a hierarchy's ranks, which are hierarchies themselves.

#include <concepts>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/adapters/hierarchical/hosts.hpp"
#include "lockstep/comm/adapters/hierarchical/quiet.hpp"
#include "lockstep/comm/adapters/hierarchical/stages.hpp"
#include "lockstep/comm/group_place.hpp"
#include "lockstep/comm/groups.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/topology/groups.hpp"

namespace lockstep::detail {

/// The place of a group's member when the ranks of its host are divided: among the members that
/// `hosts` has on this member's host. `all` are the hosts of the whole hierarchy.
inline GroupPlace place_on_host(const Hosts& all, const Hosts& hosts, const GroupPlace& place) {
  GroupPlace local = place;
  if (!place.is_member()) return local;
  local.rank = Rank{hosts.local_rank(place.rank)};
  local.members.clear();
  for (const std::size_t member : hosts.ranks(hosts.host(place.rank)))
    local.members.emplace_back(all.local_rank(place.members[member]));
  local.group = local.leader().value();  // no two groups of a host have the same leader
  return local;
}

/// The communicators of this rank's group, if it is in one. **Ranks** all of the hierarchy.
/// **Host** blocks until the members have met.
template <class Inside, class Between, class Flat>
std::unique_ptr<Stages<Inside, Between, Flat>> divide(Stages<Inside, Between, Flat>& all,
                                                      const GroupPlace& place) {
  using Group = Stages<Inside, Between, Flat>;
  constexpr bool one_joins_all = std::same_as<Flat, Between>;
  Hosts hosts = all.hosts().of(place.members);
  // A rank needs a partner on every host. Calls through two levels count ranks host by host.
  if (!hosts.is_even() || (!one_joins_all && !hosts.is_in_order()))
    hosts = Hosts::apart(place.members.size());
  const GroupPlace local = place_on_host(all.hosts(), hosts, place);
  if constexpr (one_joins_all) {
    auto flat = all.flat().template split<dynamic>(place);
    auto inside = all.inside().template split<dynamic>(local);
    if (!flat || !inside) return nullptr;
    Between between =
        join_groups(*flat, Groups<World<dynamic>>(flat->world_size(), hosts.columns()));
    return std::make_unique<Group>(std::move(hosts), std::move(*inside), std::move(between),
                                   std::move(*flat));
  } else {
    all.flat().agree(division_call(place));
    std::unique_ptr<Group> group;
    std::size_t turn = all.flat().world_size().value();  // never, for those that are in no group
    allocate_quietly(all.inside(), [&] {
      auto inside = all.inside().template split<dynamic>(local);
      std::string name = all.next_group_name();
      if (!inside) return;
      name += "." + std::to_string(place.leader().value());
      const std::string column = ", place " + std::to_string(local.rank.value());
      // The number of the column's first rank: no other column has it, and all its ranks know it.
      turn = place.members[hosts.columns()[local.rank.value()].front()].value();
      Between between = all.between().among(name + column, Rank{hosts.host(place.rank)},
                                            WorldSize{hosts.count()});
      group = std::make_unique<Group>(std::move(hosts), std::move(*inside), std::move(between),
                                      std::move(name));
    });
    if constexpr (requires { group->between().warm_up(); }) {
      by_turns(all.inside(), turn, all.flat().world_size().value(),
               [&] { group->between().warm_up(); });
    }
    return group;
  }
}

}  // namespace lockstep::detail

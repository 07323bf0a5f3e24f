// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The way of batches from the rank that reads them, for each choice of `Feed`.

#include <cstddef>
#include <type_traits>
#include <vector>

#include "lockstep/core/strong.hpp"
#include "lockstep/data/feed_policy.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep::detail {

/// One rank's part in feeding.
struct FeedRoute {
  /// A rank to which batches are sent: those of `count` ranks, from the `first` that is carried on.
  struct Hop {
    Rank to;
    std::size_t first;
    std::size_t count;
  };

  Rank reader;                ///< who reads this rank's batches, maybe itself
  Rank from;                  ///< who sends them, where this rank does not read
  std::vector<Rank> carried;  ///< whose batches come here: this rank's, then those to be sent on
  std::vector<Hop> hops;

  bool reads(Rank self) const { return reader == self; }
};

/// The part of `self` in a job's groups. A message carries a batch to the one rank that needs it:
/// a broadcast would bring every rank the batches of its whole group.
template <class Choice, Topology T>
FeedRoute feed_route(const T& groups, Rank self) {
  constexpr bool by_leaders = std::is_same_v<Choice, LeaderOfGroup>;
  const auto leader = [&](std::size_t g) { return groups.member(GroupRank{g}, LocalGroupRank{0}); };
  const std::size_t own = groups.group_rank(self).value();
  FeedRoute route;
  route.reader = leader(by_leaders ? own : 0);
  route.from = self == leader(own) ? route.reader : leader(own);
  if (self != leader(own)) {
    route.carried = {self};
    return route;
  }
  for (const Rank member : groups.members(GroupRank{own})) {
    if (member != self) route.hops.push_back({member, route.carried.size(), 1});
    route.carried.push_back(member);
  }
  if (by_leaders || !route.reads(self)) return route;
  // Batches for other groups leave first: they have a longer way.
  std::vector<FeedRoute::Hop> across;
  for (std::size_t g = 0; g != groups.group_world_size(); ++g) {
    if (g == own) continue;
    const std::size_t first = route.carried.size();
    for (const Rank member : groups.members(GroupRank{g})) route.carried.push_back(member);
    across.push_back({leader(g), first, route.carried.size() - first});
  }
  route.hops.insert(route.hops.begin(), across.begin(), across.end());
  return route;
}

}  // namespace lockstep::detail

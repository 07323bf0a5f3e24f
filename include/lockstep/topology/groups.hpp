// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Explicit lists of groups, in any order and of any sizes:
/// `Groups<World<4>, Group<0, 3>, Group<2, 1>>`.

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/topology/partition.hpp"
#include "lockstep/topology/topology.hpp"
#include "lockstep/topology/world.hpp"

namespace lockstep {

/// The ranks of one group, leader first.
template <std::size_t... Ranks>
struct Group {};

namespace detail {

/// Answers queries from a partition that is a constant or a member of Self.
template <class Self>
class PartitionQueries : public TopologyQueries<Self> {
 public:
  constexpr WorldSize world_size() const { return WorldSize{table().listed.size()}; }
  constexpr std::size_t group_world_size() const { return table().groups; }
  constexpr std::size_t group_size(GroupRank group) const {
    return table().ends[group.value()] - table().begin_of(group);
  }
  constexpr GroupRank group_rank(Rank rank) const { return table().group[rank.value()]; }
  constexpr LocalGroupRank local_group_rank(Rank rank) const { return table().place[rank.value()]; }
  constexpr Rank member(GroupRank group, LocalGroupRank place) const {
    return table().listed[table().begin_of(group) + place.value()];
  }

 private:
  constexpr const auto& table() const { return static_cast<const Self&>(*this).partition(); }
};

template <std::size_t... Ranks>
constexpr void append(Group<Ranks...>, std::size_t*& ranks, std::size_t*& sizes) {
  ((*ranks++ = Ranks), ...);
  *sizes++ = sizeof...(Ranks);
}

template <std::size_t... Ranks>
constexpr std::size_t size_of(Group<Ranks...>) {
  return sizeof...(Ranks);
}

template <std::size_t WorldRanks, class... Listed>
consteval Partition<WorldRanks> make_partition() {
  std::array<std::size_t, (size_of(Listed{}) + ... + 0)> ranks{};
  std::array<std::size_t, sizeof...(Listed)> sizes{};
  std::size_t* next_rank = ranks.data();
  std::size_t* next_size = sizes.data();
  (append(Listed{}, next_rank, next_size), ...);
  return Partition<WorldRanks>::of(WorldRanks, ranks, sizes);
}

}  // namespace detail

/// Groups as listed. Together they hold every rank of the world once.
template <class WorldPolicy, class... Listed>
class Groups : public detail::PartitionQueries<Groups<WorldPolicy, Listed...>> {
  static constexpr std::size_t world_ranks = WorldPolicy::static_size;
  static_assert(
      world_ranks != dynamic,
      "lockstep: groups listed as types need a world of known size; write World<N>, or give "
      "the groups at construction: Groups<World<dynamic>>{size, {...}}");
  static constexpr auto listed =
      detail::make_partition<world_ranks == dynamic ? 0 : world_ranks, Listed...>();

  static_assert(listed.fault != detail::PartitionFault::empty_group,
                "lockstep: a group is empty; every group needs a rank");
  static_assert(world_ranks == dynamic || listed.fault != detail::PartitionFault::out_of_range,
                "lockstep: a group lists a rank outside the world; ranks are 0 to world size - 1");
  static_assert(listed.fault != detail::PartitionFault::overlap,
                "lockstep: a rank is listed twice; groups must not overlap");
  static_assert(listed.fault != detail::PartitionFault::gap,
                "lockstep: a rank is in no group; the groups must cover the world");

 public:
  static constexpr const auto& partition() { return listed; }
};

/// Groups known at construction: `Groups<World<dynamic>>{WorldSize{4}, {{0, 3}, {2, 1}}}`.
template <>
class Groups<World<dynamic>> : public detail::PartitionQueries<Groups<World<dynamic>>> {
 public:
  Groups(WorldSize world, const std::vector<std::vector<std::size_t>>& groups) {
    std::vector<std::size_t> ranks;
    std::vector<std::size_t> sizes;
    for (const auto& group : groups) {
      ranks.insert(ranks.end(), group.begin(), group.end());
      sizes.push_back(group.size());
    }
    partition_ = detail::Partition<dynamic>::of(world.value(), ranks, sizes);
    if (partition_.fault == detail::PartitionFault::none) return;
    const std::string rank = "rank " + std::to_string(partition_.culprit.value());
    const char* const what[] = {"", "", " is outside the world", " is listed twice",
                                " is in no group"};
    throw Error("topology",
                partition_.fault == detail::PartitionFault::empty_group
                    ? "a group is empty"
                    : rank + what[static_cast<int>(partition_.fault)],
                "list every rank of the world of " + std::to_string(world.value()) +
                    " in exactly one group");
  }

  const detail::Partition<dynamic>& partition() const { return partition_; }

 private:
  detail::Partition<dynamic> partition_;
};

static_assert(Topology<Groups<World<3>, Group<0, 2>, Group<1>>> &&
              Topology<Groups<World<dynamic>>>);

}  // namespace lockstep

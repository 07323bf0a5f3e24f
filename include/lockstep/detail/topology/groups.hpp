// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Lists of groups, in any order and of any sizes, and the policy `Groups<Grid<8, 4>>`.

#include "lockstep/detail/topology/grid.hpp"

namespace lockstep::detail {

enum class PartitionFault { none, empty_group, out_of_range, overlap, gap };

/// A world divided into listed groups; a constant if the world size is static.
template <std::size_t WorldRanks>
struct Partition {
  Table<std::size_t, WorldRanks> listed{};      // ranks by group, then local rank
  Table<std::size_t, WorldRanks> ends{};        // of each group in `listed`
  Table<std::size_t, WorldRanks> group{};       // by rank
  Table<std::size_t, WorldRanks> local_rank{};  // by rank
  std::size_t groups = 0;
  PartitionFault fault = PartitionFault::none;
  Rank culprit{};

  constexpr std::size_t begin_of(GroupRank g) const {
    return g.value() == 0 ? 0 : ends[g.value() - 1];
  }

  /// Builds the partition from lists of ranks, up to the first fault, which names a rank.
  template <class Lists>
  static constexpr Partition of(std::size_t world, const Lists& lists) {
    auto seen = make_table<std::size_t, WorldRanks>(world);
    Partition partition{seen, seen, seen, seen};
    const auto failed = [&](PartitionFault fault, std::size_t rank) {
      partition.fault = fault;
      partition.culprit = Rank{rank};
      return partition;
    };
    std::size_t count = 0;
    for (const auto& ranks : lists) {
      if (ranks.empty()) return failed(PartitionFault::empty_group, 0);
      std::size_t local_rank = 0;
      for (const std::size_t rank : ranks) {
        if (rank >= world) return failed(PartitionFault::out_of_range, rank);
        if (seen[rank] != 0) return failed(PartitionFault::overlap, rank);
        seen[rank] = 1;
        partition.listed[count++] = rank;
        partition.group[rank] = partition.groups;
        partition.local_rank[rank] = local_rank++;
      }
      partition.ends[partition.groups++] = count;
    }
    for (std::size_t rank = 0; rank < world; ++rank) {
      if (seen[rank] == 0) return failed(PartitionFault::gap, rank);
    }
    return partition;
  }
};

}  // namespace lockstep::detail

namespace lockstep {

namespace axes {
struct Groups : WithName<"Groups"> {};
}  // namespace axes

/// The ranks of one group, leader first.
template <std::size_t... Ranks>
struct Group {
  static constexpr std::array<std::size_t, sizeof...(Ranks)> ranks{Ranks...};
};

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
  constexpr GroupRank group_rank(Rank rank) const { return GroupRank{table().group[rank.value()]}; }
  constexpr LocalGroupRank local_group_rank(Rank rank) const {
    return LocalGroupRank{table().local_rank[rank.value()]};
  }
  constexpr Rank member(GroupRank group, LocalGroupRank local_rank) const {
    return Rank{table().listed[table().begin_of(group) + local_rank.value()]};
  }

 private:
  constexpr const auto& table() const { return static_cast<const Self&>(*this).partition(); }
};

/// Stands for the groups of a job that has none.
struct NoGroups {};

template <class T>
inline constexpr std::size_t ranks_of_world = 0;
template <std::size_t N>
inline constexpr std::size_t ranks_of_world<World<N>> = N;

/// A topology that the compiler knows, or that a job makes from its number of ranks.
template <class T>
concept JobTopology = Topology<T> && ranks_of_world<T> == 0 &&
                      (StaticTopology<T> || std::constructible_from<T, WorldSize>);

/// The topology in a world of `N` ranks: a dynamic world size becomes the job's. Declared only.
template <std::size_t N, class T>
T in_world_of(T);
template <std::size_t N, std::size_t GroupRanks>
  requires(N != dynamic && GroupRanks != dynamic && divides(GroupRanks, N))
Grid<N, GroupRanks> in_world_of(Grid<dynamic, GroupRanks>);

template <JobTopology T>
T topology_for([[maybe_unused]] WorldSize world) {
  if constexpr (std::default_initializable<T>) {
    return T{};
  } else {
    return T(world);
  }
}

}  // namespace detail

/// Groups as listed, with every rank once. `Groups<T>` of a topology and `Groups<>` are policies.
template <class WorldPolicy = detail::NoGroups, class... Listed>
class Groups : public detail::PartitionQueries<Groups<WorldPolicy, Listed...>> {
  static constexpr std::size_t world_ranks = detail::ranks_of_world<WorldPolicy>;
  static_assert(world_ranks != 0,
                "lockstep: Groups takes a world and its groups, Groups<World<4>, Group<0, 3>, "
                "Group<1, 2>>, or as a job's policy one topology whose group size is known, "
                "Groups<Grid<8, 4>> or Groups<Grid<dynamic, 4>>");
  static_assert(
      world_ranks != dynamic,
      "lockstep: groups listed as types need a world of known size; write World<N>, or give "
      "the groups at construction: Groups<World<dynamic>>{size, {...}}");
  static constexpr std::size_t known_ranks = world_ranks == dynamic ? 0 : world_ranks;
  static constexpr auto listed = detail::Partition<known_ranks>::of(
      known_ranks, std::array<std::span<const std::size_t>, sizeof...(Listed)>{Listed::ranks...});

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
  Groups(WorldSize world, const std::vector<std::vector<std::size_t>>& groups)
      : partition_(detail::Partition<dynamic>::of(world.value(), groups)) {
    using enum detail::PartitionFault;
    const auto fault = partition_.fault;
    if (fault == none) return;
    detail::fail(
        "topology",
        {fault == empty_group ? "a group is empty" : detail::text({"rank ", partition_.culprit}),
         fault == out_of_range ? " is outside the world"
         : fault == overlap    ? " is listed twice"
         : fault == gap        ? " is in no group"
                               : ""},
        detail::text({"list every rank of the world of ", world, " in exactly one group"}));
  }

  const detail::Partition<dynamic>& partition() const { return partition_; }

 private:
  detail::Partition<dynamic> partition_;
};

/// The policy that gives a job the groups of a topology; `Groups<Grid<dynamic, 4>>` fits any world.
/// `job.group()` is this rank's group, `job.across()` the ranks with its rank in other groups.
template <detail::JobTopology T>
class Groups<T> : public detail::ValuePolicy<axes::Groups> {
 public:
  using topology = T;
  template <std::size_t N>
  using in_world = decltype(detail::in_world_of<N>(std::declval<T>()));
  /// Can a job of `N` ranks, or of as many as the launcher starts (`dynamic`), have these groups?
  template <std::size_t N>
  static constexpr bool fits = [] {
    if constexpr (N != dynamic && detail::StaticTopology<in_world<N>>) {
      return in_world<N>{}.world_size().value() == N;
    } else {
      return N == dynamic;  // else a grid whose groups do not divide the world
    }
  }();

  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Groups::name);
    if constexpr (detail::StaticTopology<T>) {
      constexpr T topology{};
      for (std::size_t r = 0; r != topology.world_size().value(); ++r) {
        hash.number(topology.group_rank(Rank{r}).value());
        hash.number(topology.local_group_rank(Rank{r}).value());
      }
    } else if constexpr (requires { T::static_group_ranks; }) {
      hash.number(T::static_group_ranks);
    }
  }
};

/// The policy of a job without groups.
template <>
class Groups<> : public detail::ValuePolicy<axes::Groups> {
 public:
  using topology = detail::NoGroups;
  template <std::size_t N>
  using in_world = detail::NoGroups;
  template <std::size_t N>
  static constexpr bool fits = true;
  static constexpr void fingerprint(detail::Hash& hash) { hash.text(axes::Groups::name); }
};

static_assert(Topology<Groups<World<3>, Group<0, 2>, Group<1>>> &&
              Topology<Groups<World<dynamic>>>);

}  // namespace lockstep

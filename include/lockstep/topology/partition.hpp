// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The tables of explicit groups, which are checked for overlaps and gaps once, and nested
/// splits: every group of a topology divided again.

#include <array>
#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/topology/grid.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep {

/// `Split<Grid<8, 4>, 2>` is `[0 1] [2 3] [4 5] [6 7]`; `Split<Transposed<Grid<8, 2>>, 2>` is
/// `[0 2] [4 6] [1 3] [5 7]`: members of a parent group stay together, in the parent's order.
template <class Parent, std::size_t Part>
class Split : public detail::TopologyQueries<Split<Parent, Part>> {
  static_assert(
      detail::EvenTopology<Parent>,
      "lockstep: only a topology whose groups all have the same size can be split evenly");
  static_assert(detail::divides(Part, detail::static_group_size<Parent>()),
                "lockstep: the part does not divide the group size; choose a part that divides it");

 public:
  constexpr Split()
    requires(Part != dynamic && std::is_empty_v<Parent>)
  = default;
  explicit Split(Parent parent)
    requires(Part != dynamic)
      : parent_(parent) {
    detail::check_divides(Part, parent.group_size());
  }
  Split(Parent parent, std::size_t part)
    requires(Part == dynamic)
      : parent_(parent), part_(part) {
    detail::check_divides(part, parent.group_size());
  }

  constexpr WorldSize world_size() const { return parent_.world_size(); }
  constexpr std::size_t group_world_size() const {
    return parent_.group_world_size() * parts_per_group();
  }
  constexpr std::size_t group_size() const { return part_.value(); }
  constexpr std::size_t group_size(GroupRank) const { return part_.value(); }
  constexpr GroupRank group_rank(Rank rank) const {
    return GroupRank{parent_.group_rank(rank).value() * parts_per_group() +
                     parent_.local_group_rank(rank).value() / group_size()};
  }
  constexpr LocalGroupRank local_group_rank(Rank rank) const {
    return LocalGroupRank{parent_.local_group_rank(rank).value() % group_size()};
  }
  constexpr Rank member(GroupRank group, LocalGroupRank place) const {
    const std::size_t part = group.value() % parts_per_group();
    return parent_.member(GroupRank{group.value() / parts_per_group()},
                          LocalGroupRank{part * group_size() + place.value()});
  }

  constexpr Parent parent() const { return parent_; }

 private:
  constexpr std::size_t parts_per_group() const { return parent_.group_size() / part_.value(); }

  [[no_unique_address]] Parent parent_;
  [[no_unique_address]] Size<Part> part_;
};

static_assert(detail::EvenTopology<Split<Grid<8, 4>, 2>>);

}  // namespace lockstep

namespace lockstep::detail {

/// The faults of a list of groups.
enum class PartitionFault { none, empty_group, out_of_range, overlap, gap };

/// A world divided into listed groups; a constant where the world's size is one.
template <std::size_t WorldRanks>
struct Partition {
  template <class T>
  using Table = std::conditional_t<WorldRanks == dynamic, std::vector<T>,
                                   std::array<T, WorldRanks == dynamic ? 0 : WorldRanks>>;

  Table<Rank> listed{};           // by group, then place
  Table<std::size_t> ends{};      // of each group in `listed`
  Table<GroupRank> group{};       // by rank
  Table<LocalGroupRank> place{};  // by rank
  std::size_t groups = 0;
  PartitionFault fault = PartitionFault::none;
  Rank culprit{};

  constexpr std::size_t begin_of(GroupRank g) const {
    return g.value() == 0 ? 0 : ends[g.value() - 1];
  }

  /// Takes `sizes[g]` ranks for each group g from `ranks`. The first fault ends it and names a
  /// rank.
  static constexpr Partition of(std::size_t world, std::span<const std::size_t> ranks,
                                std::span<const std::size_t> sizes) {
    Partition partition;
    Table<char> seen{};
    if constexpr (WorldRanks == dynamic) {
      partition.listed.resize(world);
      partition.ends.resize(world);
      partition.group.resize(world);
      partition.place.resize(world);
      seen.resize(world);
    }
    const auto failed = [&](PartitionFault fault, std::size_t rank) {
      partition.fault = fault;
      partition.culprit = Rank{rank};
      return partition;
    };
    std::size_t count = 0;
    for (const std::size_t size : sizes) {
      if (size == 0) return failed(PartitionFault::empty_group, 0);
      for (std::size_t i = 0; i < size; ++i) {
        const std::size_t rank = ranks[count];
        if (rank >= world) return failed(PartitionFault::out_of_range, rank);
        if (seen[rank] != 0) return failed(PartitionFault::overlap, rank);
        seen[rank] = 1;
        partition.listed[count++] = Rank{rank};
        partition.group[rank] = GroupRank{partition.groups};
        partition.place[rank] = LocalGroupRank{i};
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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The tables of explicit groups, which are checked for overlaps and gaps once.

#include <array>
#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/strong.hpp"

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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Grid<6, 3>`: equal groups of consecutive ranks; and the transpose of even topologies.

#include "lockstep/detail/topology/topology.hpp"

namespace lockstep {

namespace detail {

/// Does a world of `world` ranks divide into groups of `group`? True while a size is not known.
constexpr bool divides(std::size_t group, std::size_t world) {
  return group == dynamic || world == dynamic || (group != 0 && world % group == 0);
}

inline void check_divides(std::size_t group, std::size_t world) {
  if (world != 0 && divides(group, world)) return;
  fail("topology", {"a world of ", world, " does not divide into groups of ", group},
       "choose a group size that divides the world size");
}

/// The transpose: of `[0 1 2] [3 4 5]` the groups `[0 3] [1 4] [2 5]`.
template <class T>
class TransposeOf : public TopologyQueries<TransposeOf<T>> {
  static_assert(EvenTopology<T>,
                "lockstep: only a topology whose groups all have the same size can be transposed");

 public:
  constexpr TransposeOf()
    requires std::is_default_constructible_v<T>
  = default;
  constexpr explicit TransposeOf(T original) : original_(original) {}

  constexpr WorldSize world_size() const { return original_.world_size(); }
  constexpr std::size_t group_world_size() const { return original_.group_size(); }
  constexpr std::size_t group_size(GroupRank = {}) const { return original_.group_world_size(); }
  constexpr GroupRank group_rank(Rank rank) const {
    return GroupRank{original_.local_group_rank(rank).value()};
  }
  constexpr LocalGroupRank local_group_rank(Rank rank) const {
    return LocalGroupRank{original_.group_rank(rank).value()};
  }
  constexpr Rank member(GroupRank group, LocalGroupRank local_rank) const {
    return original_.member(GroupRank{local_rank.value()}, LocalGroupRank{group.value()});
  }

  constexpr T original() const { return original_; }

 private:
  [[no_unique_address]] T original_;
};

}  // namespace detail

/// The transposed topology; transposing twice gives the first one back.
template <class T>
constexpr detail::TransposeOf<T> transpose(T topology) {
  return detail::TransposeOf<T>{topology};
}
template <class T>
constexpr T transpose(detail::TransposeOf<T> topology) {
  return topology.original();
}
/// The topology whose groups are the columns of `T`'s.
template <class T>
using Transposed = decltype(transpose(std::declval<T>()));

/// Groups of `GroupRanks` consecutive ranks: `Grid<6, 3>` is `[0 1 2] [3 4 5]`. A `dynamic` number
/// is passed to the constructor, which checks it: `Grid<dynamic, 3>{WorldSize{6}}`.
template <std::size_t WorldRanks, std::size_t GroupRanks>
class Grid : public detail::TopologyQueries<Grid<WorldRanks, GroupRanks>> {
  static_assert(WorldRanks != 0, "lockstep: a grid needs a world of at least one rank");
  static_assert(detail::divides(GroupRanks, WorldRanks),
                "lockstep: the group size does not divide the world size, so some group would be "
                "smaller than the others; choose a group size that divides it");

 public:
  static constexpr std::size_t static_group_ranks = GroupRanks;

  constexpr Grid()
    requires(WorldRanks != dynamic && GroupRanks != dynamic)
  = default;

  explicit Grid(WorldSize world)
    requires(WorldRanks == dynamic && GroupRanks != dynamic)
      : world_(world.value()) {
    detail::check_divides(GroupRanks, world.value());
  }

  explicit Grid(std::size_t group_size)
    requires(WorldRanks != dynamic && GroupRanks == dynamic)
      : group_(group_size) {
    detail::check_divides(group_size, WorldRanks);
  }

  Grid(WorldSize world, std::size_t group_size)
    requires(WorldRanks == dynamic && GroupRanks == dynamic)
      : world_(world.value()), group_(group_size) {
    detail::check_divides(group_size, world.value());
  }

  constexpr WorldSize world_size() const { return WorldSize{world_.value()}; }
  constexpr std::size_t group_world_size() const { return world_.value() / group_.value(); }
  constexpr std::size_t group_size(GroupRank = {}) const { return group_.value(); }
  constexpr GroupRank group_rank(Rank rank) const { return GroupRank{rank.value() / group_size()}; }
  constexpr LocalGroupRank local_group_rank(Rank rank) const {
    return LocalGroupRank{rank.value() % group_size()};
  }
  constexpr Rank member(GroupRank group, LocalGroupRank local_rank) const {
    return Rank{group.value() * group_size() + local_rank.value()};
  }

 private:
  [[no_unique_address]] Size<WorldRanks> world_;
  [[no_unique_address]] Size<GroupRanks> group_;
};

static_assert(detail::EvenTopology<Grid<6, 3>> && detail::EvenTopology<Grid<dynamic, dynamic>>);

}  // namespace lockstep

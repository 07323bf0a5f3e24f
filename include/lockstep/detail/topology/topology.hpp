// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The topology concept: ranks divided into groups, by index arithmetic; and `World<N>`.

#include "lockstep/detail/core/dynamic.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/policy/policy.hpp"

namespace lockstep {

/// A world of ranks, each in one group. `group_rank` is a rank's group, `local_group_rank` its rank
/// there, `member` the inverse. `Grid<6, 3>{}.group_rank(Rank{4})` is a constant.
template <class T>
concept Topology =
    std::copyable<T> && requires(const T t, Rank rank, GroupRank group, LocalGroupRank local_rank) {
      { t.world_size() } -> std::same_as<WorldSize>;
      { t.group_world_size() } -> std::same_as<std::size_t>;
      { t.group_size(group) } -> std::same_as<std::size_t>;
      { t.group_rank(rank) } -> std::same_as<GroupRank>;
      { t.local_group_rank(rank) } -> std::same_as<LocalGroupRank>;
      { t.member(group, local_rank) } -> std::same_as<Rank>;
    };

namespace detail {

/// A topology all of whose groups have one size.
template <class T>
concept EvenTopology = Topology<T> && requires(const T t) {
  { t.group_size() } -> std::same_as<std::size_t>;
};

/// A topology whose sizes are all static.
template <class T>
concept StaticTopology = Topology<T> && std::is_empty_v<T> && std::default_initializable<T>;

/// The size that all groups of a topology have, if the compiler knows it.
template <class T>
consteval std::size_t static_group_size() {
  if constexpr (StaticTopology<T>) {
    constexpr T topology{};
    for (std::size_t g = 1; g < topology.group_world_size(); ++g)
      if (topology.group_size(GroupRank{g}) != topology.group_size(GroupRank{0})) return dynamic;
    return topology.group_size(GroupRank{0});
  } else if constexpr (requires { T::static_group_ranks; }) {
    return T::static_group_ranks;
  } else {
    return dynamic;
  }
}

/// The queries that every topology has, made from the functions of the concept.
template <class T>
class TopologyQueries {
 public:
  /// The ranks of a group, in the group's order.
  std::vector<Rank> members(GroupRank group) const {
    std::vector<Rank> ranks;
    for (std::size_t i = 0; i != self().group_size(group); ++i)
      ranks.push_back(self().member(group, LocalGroupRank{i}));
    return ranks;
  }

  /// The first rank of the group that `rank` is in.
  constexpr Rank leader(Rank rank) const {
    return self().member(self().group_rank(rank), LocalGroupRank{0});
  }

  /// The lowest rank of the group that `rank` is in: its leader, unless the list has another order.
  constexpr Rank group_rank_base(Rank rank) const {
    const GroupRank group = self().group_rank(rank);
    Rank lowest = rank;
    for (std::size_t i = 0; i != self().group_size(group); ++i)
      lowest = std::min(lowest, self().member(group, LocalGroupRank{i}));
    return lowest;
  }

  constexpr bool is_leader(Rank rank) const { return leader(rank) == rank; }

 private:
  constexpr const T& self() const { return static_cast<const T&>(*this); }
};

}  // namespace detail

namespace axes {
struct World : WithName<"World"> {};
}  // namespace axes

/// All ranks of a job: `N`, or `dynamic` if the launcher sets it. A topology of one group.
template <std::size_t N = dynamic>
struct World : detail::ValuePolicy<axes::World>, detail::TopologyQueries<World<N>> {
  static constexpr std::size_t static_size = N;
  static constexpr void fingerprint(detail::Hash& hash) { hash.text(axes::World::name).number(N); }

  constexpr World()
    requires(N != dynamic)
  = default;
  constexpr explicit World(WorldSize size)
    requires(N == dynamic)
      : size_(size.value()) {
    if (size == WorldSize{0}) {
      throw Error("topology", "a world of zero ranks", "give the number of ranks, 1 or more");
    }
  }

  constexpr WorldSize world_size() const { return WorldSize{size_.value()}; }
  constexpr std::size_t group_world_size() const { return 1; }
  constexpr std::size_t group_size(GroupRank = {}) const { return size_.value(); }
  constexpr GroupRank group_rank(Rank) const { return GroupRank{0}; }
  constexpr LocalGroupRank local_group_rank(Rank rank) const {
    return LocalGroupRank{rank.value()};
  }
  constexpr Rank member(GroupRank, LocalGroupRank local_rank) const {
    return Rank{local_rank.value()};
  }

 private:
  [[no_unique_address]] Size<N> size_;
};

namespace detail {

/// Throws unless a job has as many ranks as the program was compiled for.
template <std::size_t N>
void require_world(WorldSize world, Rank rank) {
  if (N == dynamic || N == world.value()) return;
  fail("launch", {"the program is for ", N, " ranks and the job has ", world},
       "start as many ranks as World<N> says, or use World<dynamic>", rank);
}

static_assert(EvenTopology<World<4>> && EvenTopology<World<dynamic>>);

}  // namespace detail

}  // namespace lockstep

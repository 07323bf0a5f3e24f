// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `World<N>`: how many ranks there are. A policy, and the topology with a single group.

#include <cstddef>
#include <string>
#include <string_view>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/policy/policy.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep {

namespace axes {
struct World : WithName<"World"> {};
}  // namespace axes

/// All ranks of a job: how many, or `dynamic` where the command says it. A topology of one group.
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
  constexpr std::size_t group_size() const { return size_.value(); }
  constexpr std::size_t group_size(GroupRank) const { return size_.value(); }
  constexpr GroupRank group_rank(Rank) const { return GroupRank{0}; }
  constexpr LocalGroupRank local_group_rank(Rank rank) const {
    return LocalGroupRank{rank.value()};
  }
  constexpr Rank member(GroupRank, LocalGroupRank place) const { return Rank{place.value()}; }

 private:
  [[no_unique_address]] Size<N> size_;
};

namespace detail {

/// Throws unless a job has as many ranks as the program was compiled for.
template <std::size_t N>
void require_world(WorldSize world, Rank rank) {
  if (N == dynamic || N == world.value()) return;
  throw Error("launch",
              "the program is for " + std::to_string(N) + " ranks and the job has " +
                  std::to_string(world.value()),
              "start as many ranks as World<N> says, or use World<dynamic>", rank);
}

static_assert(EvenTopology<World<4>> && EvenTopology<World<dynamic>>);

}  // namespace detail

}  // namespace lockstep

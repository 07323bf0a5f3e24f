// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The topology concept: a world of ranks divided into groups, as pure index arithmetic.

#include <concepts>
#include <cstddef>
#include <iterator>
#include <type_traits>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep {

/// A world of ranks, each in exactly one group. `group_rank` is a rank's group, `local_group_rank`
/// its place there, and `member` finds the rank from both. Topologies whose sizes are all static
/// are empty types, so that `Grid<6, 3>{}.group_rank(Rank{4})` is a constant.
template <class T>
concept Topology =
    std::copyable<T> && requires(const T t, Rank rank, GroupRank group, LocalGroupRank place) {
      { t.world_size() } -> std::same_as<WorldSize>;
      { t.group_world_size() } -> std::same_as<std::size_t>;
      { t.group_size(group) } -> std::same_as<std::size_t>;
      { t.group_rank(rank) } -> std::same_as<GroupRank>;
      { t.local_group_rank(rank) } -> std::same_as<LocalGroupRank>;
      { t.member(group, place) } -> std::same_as<Rank>;
    };

namespace detail {

/// A topology all of whose groups have one size.
template <class T>
concept EvenTopology = Topology<T> && requires(const T t) {
  { t.group_size() } -> std::same_as<std::size_t>;
};

/// The size that all groups of a topology have, if the compiler knows it.
template <class T>
consteval std::size_t static_group_size() {
  if constexpr (std::is_empty_v<T> && std::default_initializable<T>) {
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

/// The ranks of one group, in the group's order: a range that computes its elements.
template <class T>
class Members {
 public:
  class Iterator {
   public:
    using value_type = Rank;
    using difference_type = std::ptrdiff_t;
    using iterator_category = std::input_iterator_tag;

    constexpr Iterator() = default;
    constexpr Iterator(const Members* members, std::size_t place)
        : members_(members), place_(place) {}

    constexpr Rank operator*() const { return (*members_)[place_]; }
    constexpr Iterator& operator++() {
      ++place_;
      return *this;
    }
    constexpr Iterator operator++(int) {
      Iterator before = *this;
      ++place_;
      return before;
    }
    friend constexpr bool operator==(const Iterator&, const Iterator&) = default;

   private:
    const Members* members_ = nullptr;
    std::size_t place_ = 0;
  };

  constexpr Members(const T& topology, GroupRank group) : topology_(topology), group_(group) {}

  constexpr std::size_t size() const { return topology_.group_size(group_); }
  constexpr Rank operator[](std::size_t place) const {
    return topology_.member(group_, LocalGroupRank{place});
  }
  constexpr Iterator begin() const { return {this, 0}; }
  constexpr Iterator end() const { return {this, size()}; }

 private:
  T topology_;
  GroupRank group_;
};

/// The queries that every topology has, made from the functions of the concept.
template <class T>
class TopologyQueries {
 public:
  /// The ranks of a group.
  constexpr auto members(GroupRank group) const { return Members<T>{self(), group}; }

  /// The first rank of the group that `rank` is in.
  constexpr Rank leader(Rank rank) const {
    return self().member(self().group_rank(rank), LocalGroupRank{0});
  }

  /// The lowest rank of the group that `rank` is in. Its leader, unless the group was listed in
  /// another order.
  constexpr Rank group_rank_base(Rank rank) const {
    Rank lowest = rank;
    for (Rank member : members(self().group_rank(rank))) {
      if (member < lowest) lowest = member;
    }
    return lowest;
  }

  constexpr bool is_leader(Rank rank) const { return leader(rank) == rank; }

 private:
  constexpr const T& self() const { return static_cast<const T&>(*this); }
};

}  // namespace detail

}  // namespace lockstep

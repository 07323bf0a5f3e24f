// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The transpose of an even topology: the groups that join equal places of its groups.

#include <cstddef>
#include <type_traits>

#include "lockstep/topology/topology.hpp"

namespace lockstep {

namespace detail {

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
  constexpr std::size_t group_size() const { return original_.group_world_size(); }
  constexpr std::size_t group_size(GroupRank) const { return group_size(); }
  constexpr GroupRank group_rank(Rank rank) const {
    return GroupRank{original_.local_group_rank(rank).value()};
  }
  constexpr LocalGroupRank local_group_rank(Rank rank) const {
    return LocalGroupRank{original_.group_rank(rank).value()};
  }
  constexpr Rank member(GroupRank group, LocalGroupRank place) const {
    return original_.member(GroupRank{place.value()}, LocalGroupRank{group.value()});
  }

  constexpr T original() const { return original_; }

 private:
  [[no_unique_address]] T original_;
};

template <class T>
struct Transpose {
  using type = TransposeOf<T>;
};
template <class T>
struct Transpose<TransposeOf<T>> {
  using type = T;
};
}  // namespace detail

/// The transposed topology as a type; transposing twice gives the first one back.
template <class T>
using Transposed = typename detail::Transpose<T>::type;

/// The transposed topology as a value.
template <class T>
constexpr Transposed<T> transpose(T topology) {
  return Transposed<T>{topology};
}
template <class T>
constexpr T transpose(detail::TransposeOf<T> topology) {
  return topology.original();
}

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Nested splits: every group of a topology divided again.

#include <cstddef>
#include <type_traits>

#include "lockstep/core/dynamic.hpp"
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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Communicators of some of the ranks, from lists or from topologies.

#include <algorithm>
#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/group_place.hpp"
#include "lockstep/comm/subgroup.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep {

namespace detail {

/// The place of `parent`'s rank where the listed ranks are the only group. A list that cannot be a
/// group is an error.
template <class Parent>
GroupPlace place_among(const std::vector<Rank>& members, const Parent& parent) {
  const auto require = [&](bool ok, const char* problem) {
    if (!ok)
      throw Error("new_group", problem, "list ranks of the parent, each once", parent.rank());
  };
  require(!members.empty(), "the list is empty");
  GroupPlace place;
  Hash hash;
  for (std::size_t i = 0; i < members.size(); ++i) {
    require(members[i].value() < parent.world_size().value(), "a rank is outside the world");
    require(std::count(members.begin(), members.end(), members[i]) == 1, "a rank is listed twice");
    hash.number(members[i].value());
    if (members[i] != parent.rank()) continue;
    place.group = 0;
    place.rank = Rank{i};
  }
  place.members = members;
  place.division = hash.value();
  place.divided = members.size();
  return place;
}

/// The place of `parent`'s rank in a topology.
template <Topology T, class Parent>
GroupPlace place_in(const T& topology, const Parent& parent) {
  if (topology.world_size() != parent.world_size()) {
    throw Error("join_groups",
                "the topology is for " + std::to_string(topology.world_size().value()) +
                    " ranks and the communicator has " +
                    std::to_string(parent.world_size().value()),
                "give them the same world", parent.rank());
  }
  Hash hash;
  for (std::size_t r = 0; r < parent.world_size().value(); ++r) {
    hash.number(topology.group_rank(Rank{r}).value());
    hash.number(topology.local_group_rank(Rank{r}).value());
  }
  const GroupRank group = topology.group_rank(parent.rank());
  GroupPlace place{group.value(),
                   Rank{topology.local_group_rank(parent.rank()).value()},
                   {},
                   hash.value(),
                   parent.world_size().value()};
  for (const Rank member : topology.members(group)) place.members.push_back(member);
  return place;
}

}  // namespace detail

/// What `new_group` returns: a `std::optional` that is empty on a rank outside of the group. To use
/// an empty one is an error that says so.
template <class C>
class OptionalGroup : public std::optional<C> {
  using Base = std::optional<C>;

 public:
  /// `rank` is the rank's number in the parent.
  OptionalGroup(Base group, Rank rank) : Base(std::move(group)), rank_(rank) {}

  C& operator*() & { return *require_member(*this); }
  const C& operator*() const& { return *require_member(*this); }
  C&& operator*() && { return std::move(*require_member(*this)); }
  C* operator->() { return require_member(*this); }
  const C* operator->() const { return require_member(*this); }
  C& value() & { return **this; }
  const C& value() const& { return **this; }
  C&& value() && { return *std::move(*this); }

 private:
  template <class Group>
  static auto require_member(Group& group) {
    if (!group.has_value()) [[unlikely]]
      throw Error("using a group", "this rank is not a member of it",
                  "ask `if (group)` first: on other ranks new_group returns an empty one",
                  group.rank_);
    return group.Base::operator->();
  }

  Rank rank_;
};

/// A communicator of the listed ranks, in the listed order; nothing on the others. **Ranks** all of
/// `parent`, members or not, with the same list. **Host** blocks until the members have met.
template <Splitting Parent>
auto new_group(Parent& parent, const std::vector<Rank>& members) {
  auto group = parent.template split<dynamic>(detail::place_among(members, parent));
  return OptionalGroup<typename decltype(group)::value_type>(std::move(group), parent.rank());
}

/// The group of `topology` that this rank is in. Where the topology is static, the group's size is
/// too: `join_groups(comm, Grid<6, 3>{})` is a communicator whose world of 3 the compiler knows.
/// **Ranks** all of `parent`. **Host** blocks until all have come.
template <Topology T, Splitting Parent>
auto join_groups(Parent& parent, const T& topology = {}) {
  auto group =
      parent.template split<detail::static_group_size<T>()>(detail::place_in(topology, parent));
  if (!group) std::terminate();  // a topology has every rank in a group
  return std::move(*group);
}

}  // namespace lockstep

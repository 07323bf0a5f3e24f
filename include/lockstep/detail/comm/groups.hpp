// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Communicators of some of the ranks, by list or by topology, and collectives of strings.

#include "lockstep/detail/comm/collectives.hpp"
#include "lockstep/detail/topology/topology.hpp"

namespace lockstep {

/// The communicator of the listed ranks of `Parent`, which must outlive it. A failure in the group
/// is a failure of the parent. **Host** and **Stream** as the parent has them.
template <class Parent, std::size_t Ranks = dynamic>
class Subgroup : public Collectives<Subgroup<Parent, Ranks>>, public detail::HostAllocating {
 public:
  static constexpr std::size_t most_in_flight = static_cast<std::size_t>(-1);

  Subgroup(Parent& parent, const detail::GroupPosition& position)
      : parent_(&parent), rank_(position.rank), members_(position.members) {}

  Rank rank() const { return rank_; }
  WorldSize world_size() const { return WorldSize{Ranks == dynamic ? members_.size() : Ranks}; }
  std::chrono::milliseconds timeout() const { return parent_->timeout(); }
  void set_timeout(std::chrono::milliseconds timeout) { parent_->set_timeout(timeout); }
  void abort(std::string_view reason) { parent_->abort(reason); }
  void give_up() { parent_->give_up(); }
  bool is_broken() const { return parent_->is_broken(); }

  // Called by `Collectives`.

  template <class C>
    requires C::is_message
  void execute(C message) {
    message.root = members_[message.root.value()];
    parent_->perform(message);
  }

 private:
  Parent* parent_;
  Rank rank_;
  std::vector<Rank> members_;
};

namespace detail {
inline std::span<std::uint8_t> bytes_of(std::string& text) {
  return {reinterpret_cast<std::uint8_t*>(text.data()), text.size()};
}
}  // namespace detail

/// `object` = root's object, which is returned. **Ranks** all. **Host** blocks.
template <Communicator C>
std::string& broadcast_object(C& comm, std::string& object, Rank root) {
  std::uint64_t size[] = {object.size()};
  comm.broadcast(size, root);
  object.resize(size[0]);
  comm.broadcast(detail::bytes_of(object), root);
  return object;
}
/// The same for a temporary: `const auto id = broadcast_object(comm, make_id(), Rank{0});`
template <Communicator C>
[[nodiscard("the object is returned")]] std::string broadcast_object(C& comm,
                                                                     const std::string& object,
                                                                     Rank root) {
  std::string copy = object;
  return std::move(broadcast_object(comm, copy, root));
}

/// Every rank's object, by rank. **Ranks** all. **Host** blocks.
template <Communicator C>
std::vector<std::string> all_gather_objects(C& comm, std::string object) {
  const std::size_t world = comm.world_size().value();
  const std::uint64_t size[] = {object.size()};
  std::vector<std::uint64_t> sizes(world);
  comm.all_gather(size, sizes);
  const std::uint64_t longest = *std::max_element(sizes.begin(), sizes.end());
  object.resize(longest);
  std::string all(longest * world, '\0');
  comm.all_gather(detail::bytes_of(object), detail::bytes_of(all));
  std::vector<std::string> objects;
  objects.reserve(world);
  for (std::size_t w = 0; w < world; ++w) objects.push_back(all.substr(w * longest, sizes[w]));
  return objects;
}

/// On root, every rank's object; elsewhere nothing. **Ranks** all. **Host** blocks.
template <Communicator C>
std::vector<std::string> gather_objects(C& comm, std::string object, Rank root) {
  std::vector<std::string> objects = all_gather_objects(comm, std::move(object));
  if (comm.rank() != root) objects.clear();
  return objects;
}

/// This rank's object of root's `objects`, one for every rank. **Ranks** all. **Host** blocks.
template <Communicator C>
std::string scatter_objects(C& comm, const std::vector<std::string>& objects, Rank root) {
  std::string mine;
  for (std::size_t w = 0; w < comm.world_size().value(); ++w) {
    std::string object = comm.rank() == root ? objects.at(w) : std::string();
    broadcast_object(comm, object, root);
    if (comm.rank() == Rank{w}) mine = std::move(object);
  }
  return mine;
}

namespace detail {

/// This rank's position if `members` is the only group. Throws unless they are distinct ranks.
template <class Parent>
GroupPosition position_among(const std::vector<Rank>& members, const Parent& parent) {
  const auto require = [&](bool ok, const char* problem) {
    if (!ok)
      throw Error("new_group", problem, "list ranks of the parent, each once", parent.rank());
  };
  require(!members.empty(), "the list is empty");
  GroupPosition position;
  Hash hash;
  for (std::size_t i = 0; i < members.size(); ++i) {
    require(members[i].value() < parent.world_size().value(), "a rank is outside the world");
    require(std::count(members.begin(), members.end(), members[i]) == 1, "a rank is listed twice");
    hash.number(members[i].value());
    if (members[i] != parent.rank()) continue;
    position.group = 0;
    position.rank = Rank{i};
  }
  position.members = members;
  position.division = hash.value();
  position.divided = members.size();
  return position;
}

template <Topology T, class Parent>
GroupPosition position_in(const T& topology, const Parent& parent) {
  if (topology.world_size() != parent.world_size()) {
    fail("join_groups",
         {"the topology is for ", topology.world_size().value(), " ranks and the communicator has ",
          parent.world_size().value()},
         "give them the same world", parent.rank());
  }
  Hash hash;
  for (std::size_t r = 0; r < parent.world_size().value(); ++r) {
    hash.number(topology.group_rank(Rank{r}).value());
    hash.number(topology.local_group_rank(Rank{r}).value());
  }
  const GroupRank group = topology.group_rank(parent.rank());
  return {group.value(), Rank{topology.local_group_rank(parent.rank()).value()},
          topology.members(group), hash.value(), parent.world_size().value()};
}

}  // namespace detail

/// What `new_group` returns: empty on ranks outside of the group, where access throws.
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

/// A communicator of the listed ranks, in the listed order; empty on the others. **Ranks** all of
/// `parent`, members or not, with the same list. **Host** blocks until the members have joined.
template <Splitting Parent>
auto new_group(Parent& parent, const std::vector<Rank>& members) {
  auto group = parent.template split<dynamic>(detail::position_among(members, parent));
  return OptionalGroup<typename decltype(group)::value_type>(std::move(group), parent.rank());
}

/// This rank's group in `topology`. A static topology gives a static group size, such as 3 for
/// `join_groups(comm, Grid<6, 3>{})`. **Ranks** all. **Host** blocks until all have joined.
template <Topology T, Splitting Parent>
auto join_groups(Parent& parent, const T& topology = {}) {
  auto group =
      parent.template split<detail::static_group_size<T>()>(detail::position_in(topology, parent));
  if (!group) std::terminate();  // a topology has every rank in a group
  return std::move(*group);
}

}  // namespace lockstep

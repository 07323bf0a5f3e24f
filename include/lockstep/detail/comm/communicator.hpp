// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The communicator concepts, a rank's position among groups, and `allocate` for any backend.

#include <cstdio>

#include "lockstep/detail/comm/collective.hpp"
#include "lockstep/detail/device/device.hpp"

namespace lockstep::detail {

/// One rank's position in a division of all ranks into groups; `group` is MPI's color.
struct GroupPosition {
  std::size_t group = dynamic;  // `dynamic`: this rank is in no group
  Rank rank{};                  // in its group
  std::vector<Rank> members{};  // the parent's ranks that are in the group, in its order
  std::uint64_t division = 0;   // a hash over the whole division, which all ranks must agree on
  std::size_t divided = 0;      // ranks in all groups together

  bool is_member() const { return group != dynamic; }
  Rank leader() const { return members.front(); }
  WorldSize world() const { return WorldSize{members.size()}; }
};

/// The description of a division, which ranks compare before they make its groups.
inline Call division_call(const GroupPosition& position) {
  Call call{CollectiveKind::new_group};
  call.count = position.divided;
  char text[17] = {};
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(position.division));
  return call.with(text);
}

template <class Arena>
class Allocating {
 public:
  /// `count` elements, zeroed. The memory lives as long as the communicator. **Ranks** any.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    return {reinterpret_cast<T*>(arenas_.emplace_back(count * sizeof(T)).data()), count};
  }

 private:
  std::vector<Arena> arenas_;
};
using HostAllocating = Allocating<HostArena>;

}  // namespace lockstep::detail

namespace lockstep {

/// Ranks that exchange elements. All ranks call every member in the same order, except `rank`,
/// `world_size`, `send`, `receive` and `abort`. Reductions are bitwise equal on all ranks.
template <class C>
concept Communicator =
    requires(C& comm, std::span<float> data, std::span<const float> in, Rank root) {
      { comm.rank() } -> std::same_as<Rank>;
      { comm.world_size() } -> std::same_as<WorldSize>;
      comm.barrier();
      comm.all_reduce(data, Average{});
      comm.reduce(data, root, Sum{});
      comm.broadcast(data, root);
      comm.all_gather(in, data);
      comm.gather(in, data, root);
      comm.scatter(in, data, root);
      comm.reduce_scatter(in, data, Sum{});
      comm.all_to_all(in, data);
      comm.send(in, root);
      comm.receive(data, root);
      comm.abort("a reason that every other rank's call fails with");
    };

/// A communicator that allocates the memory it communicates best.
template <class C>
concept ArenaAllocating = Communicator<C> && requires(C& comm, std::size_t count) {
  { comm.template allocate<float>(count) } -> std::same_as<std::span<float>>;
};

/// A communicator that reduces in the background, at most `most_in_flight` calls at a time.
template <class C>
concept AsyncReducing = Communicator<C> && requires(C& comm, std::span<float> data) {
  { C::most_in_flight } -> std::convertible_to<std::size_t>;
  { comm.all_reduce_async(data, Sum{}).test() } -> std::same_as<bool>;
  comm.all_reduce_async(data, Sum{}).wait();
};

/// A communicator that divides its ranks into groups with communicators of their own (groups.hpp).
template <class C>
concept Splitting = Communicator<C> && requires(C& comm, const detail::GroupPosition& position) {
  { comm.template split<2>(position)->world_size() } -> std::same_as<WorldSize>;
};

}  // namespace lockstep

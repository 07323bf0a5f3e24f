// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Hierarchical<...>>`'s communicator: one kind of communicator inside a host,
/// another between hosts.

#include <chrono>
#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/adapters/hierarchical/hosts.hpp"
#include "lockstep/comm/adapters/hierarchical/stages.hpp"
#include "lockstep/comm/call/queue.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/collectives.hpp"
#include "lockstep/comm/combine.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/groups.hpp"
#include "lockstep/comm/variable_gather.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/topology/groups.hpp"

namespace lockstep::detail {

/// The place of a group's member when the ranks of its host are divided: among the members that
/// `hosts` has on this member's host. `all` are the hosts of the whole hierarchy.
inline GroupPlace place_on_host(const Hosts& all, const Hosts& hosts, const GroupPlace& place) {
  GroupPlace local = place;
  if (!place.is_member()) return local;
  local.rank = Rank{hosts.local_rank(place.rank)};
  local.members.clear();
  for (const std::size_t member : hosts.ranks(hosts.host(place.rank)))
    local.members.emplace_back(all.local_rank(place.members[member]));
  local.group = local.leader().value();  // no two groups of a host have the same leader
  return local;
}

/// The communicators of this rank's group, if it is in one. **Ranks** all of the hierarchy.
/// **Host** blocks until the members have met.
template <class Inside, class Between, class Flat>
std::unique_ptr<HierarchyStages<Inside, Between, Flat>> divide(
    HierarchyStages<Inside, Between, Flat>& all, const GroupPlace& place) {
  using Group = HierarchyStages<Inside, Between, Flat>;
  constexpr bool one_joins_all = std::same_as<Flat, Between>;
  Hosts hosts = all.hosts().of(place.members);
  // A rank needs a partner on every host. Calls through two levels count ranks host by host.
  if (!hosts.is_even() || (!one_joins_all && !hosts.is_in_order()))
    hosts = Hosts::apart(place.members.size());
  const GroupPlace local = place_on_host(all.hosts(), hosts, place);
  if constexpr (one_joins_all) {
    auto flat = all.flat().template split<dynamic>(place);
    auto inside = all.inside().template split<dynamic>(local);
    if (!flat || !inside) return nullptr;
    Between between =
        join_groups(*flat, Groups<World<dynamic>>(flat->world_size(), hosts.columns()));
    return std::make_unique<Group>(std::move(hosts), std::move(*inside), std::move(between),
                                   std::move(*flat));
  } else {
    all.flat().agree(division_call(place));
    std::unique_ptr<Group> group;
    std::size_t turn = all.flat().world_size().value();  // never, for those that are in no group
    allocate_quietly(all.inside(), [&] {
      auto inside = all.inside().template split<dynamic>(local);
      std::string name = all.next_group_name();
      if (!inside) return;
      name += "." + std::to_string(place.leader().value());
      const std::string column = ", place " + std::to_string(local.rank.value());
      // The number of the column's first rank: no other column has it, and all its ranks know it.
      turn = place.members[hosts.columns()[local.rank.value()].front()].value();
      Between between = all.between().among(name + column, Rank{hosts.host(place.rank)},
                                            WorldSize{hosts.count()});
      group = std::make_unique<Group>(std::move(hosts), std::move(*inside), std::move(between),
                                      std::move(name));
    });
    if constexpr (requires { group->between().warm_up(); }) {
      by_turns(all.inside(), turn, all.flat().world_size().value(),
               [&] { group->between().warm_up(); });
    }
    return group;
  }
}

}  // namespace lockstep::detail

namespace lockstep {

/// An all-reduce has three stages: reduce inside each host, reduce each piece between hosts, gather
/// inside each host. The data crosses the network once for each host, not once for each rank, and
/// all ranks carry the same share of it. A reduce-scatter of much data is the first two stages, an
/// all-gather the last two. Results are the same bits on all ranks. Other collectives use the
/// network alone, or both communicators where none joins all ranks.
///
/// A failure in one stage ends all of them, on all ranks.
///
/// **Host** every collective blocks until the result is here and the arguments may be used again.
/// **Stream** none.
template <Communicator Inside, Communicator Between, class Flat = Between>
class HierarchicalCommunicator
    : public Collectives<HierarchicalCommunicator<Inside, Between, Flat>> {
  using Stages = detail::HierarchyStages<Inside, Between, Flat>;

 public:
  using Milliseconds = std::chrono::milliseconds;

  /// The number of calls under way has no limit; this one is large enough for every job.
  static constexpr std::size_t most_under_way = 256;

  explicit HierarchicalCommunicator(std::unique_ptr<Stages> stages) : stages_(std::move(stages)) {}

  Rank rank() const { return stages_->flat().rank(); }
  WorldSize world_size() const { return stages_->flat().world_size(); }
  Milliseconds timeout() const { return stages_->flat().timeout(); }
  void set_timeout(Milliseconds timeout) {
    stages_->inside().set_timeout(timeout + detail::inside_margin);
    stages_->between().set_timeout(timeout);
    stages_->flat().set_timeout(timeout);
  }

  /// `count` elements that the inner communicator handles best. **Ranks** all, with the same count.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    stages_->queue().drain();
    std::span<T> memory;
    detail::allocate_quietly(stages_->inside(),
                             [&] { memory = stages_->inside().template allocate<T>(count); });
    return memory;
  }

  /// Foresees all-reduces of up to so many bytes, in the type of their sums: see `Stages::reserve`.
  /// **Ranks** all. **Host** blocks.
  void reserve(std::size_t bytes) {
    stages_->queue().drain();
    stages_->reserve(bytes);
  }
  /// What the ranks of this host have allocated by themselves is there. On a GPU it comes before
  /// the next collective: see `allocate_quietly`. **Ranks** all. **Host** blocks.
  void settle_allocations() {
    if constexpr (!detail::works_on_host<Inside>) stages_->inside().barrier();
  }

  /// Gives up: every other rank's call fails with this reason.
  void abandon(std::string_view reason) {
    stages_->queue().drain();
    stages_->abandon(reason);
  }
  /// Gives up because an exception has ended this rank's part; another thread may be in a call.
  void give_up() { stages_->give_up(); }
  /// Has a call failed? Then every later call fails too.
  bool is_broken() const { return stages_->is_broken(); }
  /// Throws the fault, if there is one: of a stage, or of the communicators between hosts.
  void raise_fault() {
    stages_->raise_fault();
    if constexpr (requires { stages_->between().raise_fault(); }) stages_->between().raise_fault();
  }

  // For the front and for adapters.

  template <class C>
  void perform(const C& call) {
    if constexpr (C::is_message) {
      stages_->flat().perform(call);
    } else {
      stages_->queue().drain();
      make(*stages_, call);
    }
  }

  void agree(const detail::Call& call) {
    stages_->queue().drain();
    stages_->through_flat([&](Flat& flat) { flat.agree(call); });
  }

  template <class C>
  auto start(const C& call) {
    stages_->raise_fault();
    const auto later = [stages = stages_.get(), call] { make(*stages, call); };
    return Work<detail::PendingInQueue<Stages, decltype(later)>>(std::in_place, *stages_, later);
  }

  template <class T>
  void gather_pieces(std::span<const T> in, std::span<T> out, const GatheredPieces& pieces,
                     Rank root, bool on_device) {
    stages_->queue().drain();
    stages_->through_flat(
        [&](Flat& flat) { flat.gather_pieces(in, out, pieces, root, on_device); });
  }

  /// The communicator of this rank's group, if it is in one: a hierarchy too, of the hosts that the
  /// members are on. Where these have different numbers of members, every member counts as a host
  /// of its own, and the network is used alone.
  template <std::size_t GroupRanks>
  std::optional<HierarchicalCommunicator> split(const detail::GroupPlace& place) {
    stages_->queue().drain();
    std::unique_ptr<Stages> group;
    stages_->through_flat([&](Flat&) { group = detail::divide(*stages_, place); });
    if (group == nullptr) return std::nullopt;
    return std::optional<HierarchicalCommunicator>(std::in_place, std::move(group));
  }

 private:
  /// Fewer bytes than these wait for hosts rather than for their turn on the network.
  static constexpr std::size_t few_bytes = 64 << 10;

  template <class C>
  static void make(Stages& stages, const C& call) {
    constexpr auto kind = C::kind;
    if constexpr (kind == detail::CollectiveKind::all_reduce) {
      if (takes(stages, call)) return stages.all_reduce(call);
    } else if constexpr (kind == detail::CollectiveKind::reduce_scatter) {
      if (is_large(call.in) && takes(stages, call)) return stages.reduce_scatter(call);
    } else if constexpr (kind == detail::CollectiveKind::all_gather) {
      if (is_large(call.out) && takes(stages, call)) return stages.all_gather(call);
    }
    stages.through_flat([&](Flat& flat) { flat.perform(call); });
  }

  template <class T>
  static bool is_large(std::span<T> pieces) {
    return pieces.size_bytes() > few_bytes;
  }
  /// On GPUs the stages handle device memory only; calls with host memory use the network alone.
  template <class C>
  static bool takes(Stages& stages, const C& call) {
    return call.count == 0 || detail::passes_of(stages.inside()).takes(call.in.data());
  }

  std::unique_ptr<Stages> stages_;
};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Gloo>`'s communicator: collectives of ranks on any number of hosts, through
/// sockets.

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/comm/backends/gloo/engine.hpp"
#include "lockstep/comm/backends/gloo/rendezvous.hpp"
#include "lockstep/comm/backends/gloo/transport.hpp"
#include "lockstep/comm/call/queue.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/collectives.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/topology/world.hpp"

namespace lockstep {

/// Collectives through Gloo. Results are the same bits on all ranks and in every run with as many
/// ranks. All-reduces are combined in the order of Gloo's ring; all-reduces of 16-bit floats and
/// all other reductions are combined in rank order.
///
/// Every call is compared over ranks before anything is written. A thread watches: a rank that is
/// gone, and a call that is not over at the time limit, end the communicator on all ranks with an
/// error, which every call throws from then on. Nothing hangs.
///
/// Asynchronous calls are made by another thread, in the order of posting, because Gloo's
/// algorithms block.
///
/// **Host** every collective blocks until the result is here and the arguments may be used again.
/// **Stream** none: host memory only.
template <std::size_t Ranks = dynamic>
class GlooCommunicator : public Collectives<GlooCommunicator<Ranks>>,
                         public detail::HostAllocating {
  using Engine = detail::over_gloo::Engine;
  using Transport = detail::over_gloo::Transport;

 public:
  using Milliseconds = std::chrono::milliseconds;

  /// The number of calls under way has no limit; this one is large enough for every job.
  static constexpr std::size_t most_under_way = 256;

  /// Joins the job's communicator of this name. **Ranks** all. **Host** blocks until all have come.
  GlooCommunicator(const Membership& member, Store& store, const std::string& name = "world")
      : GlooCommunicator(join_options(member, store, name)) {}
  explicit GlooCommunicator(detail::over_gloo::JoinOptions options)
      : engine_(std::make_shared<Engine>(std::move(options))) {}

  GlooCommunicator(GlooCommunicator&&) noexcept = default;
  GlooCommunicator& operator=(GlooCommunicator&&) = delete;

  Rank rank() const { return engine().rank(); }
  WorldSize world_size() const { return WorldSize{engine().world()}; }
  Milliseconds timeout() const { return engine().timeout(); }
  void set_timeout(Milliseconds timeout) { engine().set_timeout(timeout); }

  /// Gives up: every other rank's call fails with this reason.
  void abandon(std::string_view reason) { engine().give_up(reason); }
  /// Gives up because an exception has ended this rank's part; another thread may be in a call.
  void give_up() { engine().give_up(); }
  /// Has a call failed? Then every later call fails too.
  bool is_broken() const { return engine().is_broken(); }

  // For the front and for adapters.

  template <class C>
  void perform(const C& call) {
    if constexpr (C::is_message) {
      engine().message(call.call(), call.root, [&] {
        Transport messages(engine(), detail::over_gloo::OwnSlot::message);
        detail::announce_message(messages, call);
        messages.execute(call);
      });
    } else {
      engine().drain();
      execute_agreed(engine(), call);
    }
  }

  void agree(const detail::Call& call) {
    engine().drain();
    engine().collective(call, [] {});
  }

  template <class C>
  auto start(const C& call) {
    engine().pending().raise_fault();
    const auto make = [&engine = engine(), call] { execute_agreed(engine, call); };
    return Work<detail::PendingInQueue<Engine, decltype(make)>>(std::in_place, engine(), make);
  }

  /// The communicator of this rank's group, if it is in one. Groups share their parent's thread for
  /// sockets.
  template <std::size_t GroupRanks>
  std::optional<GlooCommunicator<GroupRanks>> split(const detail::GroupPlace& place) {
    agree(detail::division_call(place));
    detail::over_gloo::JoinOptions options = engine().joined();
    options.name = engine().next_group_name() + "." + std::to_string(place.group);
    if (!place.is_member()) return std::nullopt;
    options.rank = place.rank;
    options.world = place.world();
    options.timeout = timeout();
    return std::optional<GlooCommunicator<GroupRanks>>(std::in_place, std::move(options));
  }

  /// A further communicator, of ranks of the job that need not be in this one. No other of the job
  /// has its name. **Ranks** its members. **Host** blocks until all have come.
  GlooCommunicator<> among(const std::string& name, Rank rank, WorldSize world) const {
    detail::over_gloo::JoinOptions options = engine().joined();
    options.name = name;
    options.rank = rank;
    options.world = world;
    options.timeout = timeout();
    return GlooCommunicator<>(std::move(options));
  }

 private:
  Engine& engine() const { return *engine_; }

  /// Compares the call over ranks, and moves elements only if all make the same call.
  template <class C>
  static void execute_agreed(Engine& engine, const C& call) {
    engine.collective(call.call(), [&] {
      if constexpr (C::kind != detail::CollectiveKind::barrier) {
        Transport transport(engine);
        detail::execute_any(transport, call);
      }
    });
  }

  static detail::over_gloo::JoinOptions join_options(const Membership& member, Store& store,
                                                     const std::string& name) {
    detail::require_world<Ranks>(member.world, member.rank);
    const std::string known = detail::numbered_meeting(store, member.rank, "gloo", name);
    const std::string address =
        detail::over_gloo::listening_address(member, store, "lockstep/gloo/" + known + "/");
    return {member.rank,
            member.world,
            known,
            std::make_shared<Store>(store.share()),
            detail::over_gloo::make_device(address, member.rank),
            member.timeout};
  }

  detail::over_gloo::WatchedEngine engine_;  // ends before the memory that it uses
};

/// The Gloo communicator of a job's ranks. `name` tells several of one job apart. **Ranks** all.
/// **Host** blocks until all have come.
template <std::size_t Ranks = dynamic>
GlooCommunicator<Ranks> make_gloo_communicator(const Membership& member, Store& store,
                                               const std::string& name = "world") {
  return GlooCommunicator<Ranks>(member, store, name);
}

}  // namespace lockstep

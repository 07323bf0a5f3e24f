// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Gloo>`'s communicator: collectives of ranks on any number of hosts, through
/// sockets. Ranks compare the call, Gloo's algorithm runs, and its exceptions become errors that
/// say what happened.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/gloo/connections.hpp"
#include "lockstep/comm/backends/gloo/rendezvous.hpp"
#include "lockstep/comm/backends/gloo/transport.hpp"
#include "lockstep/comm/call/fault_channel.hpp"
#include "lockstep/comm/call/peers.hpp"
#include "lockstep/comm/call/pending_calls.hpp"
#include "lockstep/comm/call/watchdog.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/collectives.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/core/worker.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep::detail::over_gloo {

using Milliseconds = std::chrono::milliseconds;

/// The arguments with which a rank joins a communicator, whose `name` is unique in the job.
struct JoinOptions {
  Rank rank;
  WorldSize world;
  std::string name;
  std::shared_ptr<Store> store;
  std::shared_ptr<::gloo::transport::Device> device;
  Milliseconds timeout;
};

/// One rank's end of a communicator. It shows the other ranks (`Peers`) to the thread that watches.
class Engine {
 public:
  /// **Ranks** all. **Host** blocks until all are connected.
  explicit Engine(JoinOptions joined)
      : joined_(std::move(joined)),
        timeout_(joined_.timeout),
        board_(board_within(answer_limit)),
        reasons_board_(board_within(loss_limit)),
        connections_(std::make_shared<Connections>(joined_.rank, joined_.world)),
        reasons_(world()) {
    const std::string prefix = "lockstep/gloo/" + joined_.name + "/";
    try {
      joined_.store->barrier(prefix + "all", joined_.rank, joined_.world, joined_.timeout);
      connections_->connect(std::make_shared<MeetingStore>(*joined_.store, prefix, joined_.rank,
                                                           joined_.world, joined_.timeout),
                            joined_.device, joined_.timeout);
      roll_ = std::make_unique<RollCall>(*connections_);
      // A rank that ends while the others connect is named as one that ends in a call.
      if (const auto error =
              look_after("joining " + described(), [](std::size_t) { return true; })) {
        fail(*error);
        throw Error(*error);
      }
      // A rank that fails now would look like a network on which the others cannot connect.
      joined_.store->barrier(prefix + "connected", joined_.rank, joined_.world, joined_.timeout);
    } catch (const Error& error) {
      throw error.on(joined_.rank);
    } catch (const std::exception& error) {
      throw Error("Backend<Gloo>", std::string("the ranks cannot connect: ") + error.what(),
                  "let the hosts reach each other's ports, or set LOCKSTEP_INTERFACE to an "
                  "interface on which they do",
                  joined_.rank);
    }
  }

  const JoinOptions& joined() const { return joined_; }
  Rank rank() const { return joined_.rank; }
  std::size_t world() const { return joined_.world.value(); }
  Milliseconds timeout() const { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(Milliseconds timeout) { timeout_.store(timeout, std::memory_order_relaxed); }
  std::string next_group_name() { return joined_.name + "/" + std::to_string(groups_++); }

  RollCall& roll() { return *roll_; }
  PendingCalls& pending() { return pending_; }
  std::optional<PendingCall> waiting() const { return pending_.oldest(); }
  TaskQueue& queue() { return queue_; }

  // Calls

  /// Compares the call over ranks, and runs `work(transport)` only if all make the same call.
  /// **Ranks** all, in the same order. **Host** blocks.
  template <class Work>
  void collective(const Call& call, const Work& work) {
    make(call, std::nullopt, [&](PendingCalls::Entry entry) {
      verify(call, roll_->exchange(call));
      pending_.agree(entry);
      Transport transport(connections_, roll_->number());
      work(transport);
    });
  }

  /// Runs `work(transport)`, a message to or from one other rank. Nothing is compared. **Host**
  /// blocks.
  template <class Work>
  void message(const Call& call, Rank peer, const Work& work) {
    make(call, peer, [&](PendingCalls::Entry) {
      Transport transport(connections_, 0, OwnSlot::message);
      work(transport);
    });
  }

  // Faults

  bool is_broken() const { return pending_.is_broken(); }
  /// Notes the fault, if it is the first, tells the others why, and ends all connections. The words
  /// come first, so that a rank that notices the end finds them.
  void fail(const Error& error) {
    fail(error, text({error.is_consequence() ? because_of_another : "", error.text()}));
  }
  void fail(const Error& error, const std::string& reason) {
    try {
      if (world() != 1) board_.give_reason(reason);
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): others find out by themselves then
    }
    pending_.note(error);
    connections_->abort();
  }
  /// Ends what is in flight, and tells the others why.
  void give_up(std::string_view reason = ended_by_exception) {
    if (!is_broken()) fail(gave_up(described(), reason, rank()), std::string(reason));
  }

  // The other ranks: `Peers`. One thread at a time may ask.

  /// The error that ends the wait for a call, if there is one. `lacks(w)`: rank w has yet to do its
  /// part. Where connections have ended, the reasons of those ranks are read.
  template <class Lacks>
  std::optional<Error> look_after(const std::string& operation, const Lacks& lacks) {
    // A rank says why it gives up before it ends its connections. One that has not has died.
    for (std::size_t w = 0; w < world() && !died_; ++w) {
      if (!is_cut_off(w)) continue;
      if (const auto reason = reason_of(w)) {
        reasons_[w] = *reason;
      } else {
        died_ = w;
      }
    }
    return find_fault(*this, operation, lacks);
  }
  bool has_left(std::size_t w) const { return roll_->has_left(w); }
  bool has_died(std::size_t w) const { return died_ == w; }
  static constexpr const char* how_died() { return " failed: its connection ended without a word"; }
  std::string abort_reason(std::size_t w) const { return reasons_[w]; }

  // The end

  void drain() { queue_.drain(); }
  /// When this rank closes its sockets, TCP may lose messages that are still on their way. So the
  /// rank waits until the others say farewell or make their next call, or a limit.
  void close() {
    if (!is_broken()) roll_->say_farewell(Greeting::State::leaves, farewell_limit);
  }
  /// A failed engine has ended its connections already.
  static void abort() {}

 private:
  /// An error comes within a second of the time limit: two answers of the store fit.
  static constexpr Milliseconds answer_limit{400};
  /// A lost connection is noticed long before the time limit: on a busy host the store may take
  /// longer to say whose fault it is.
  static constexpr Milliseconds loss_limit{1'500};
  static constexpr Milliseconds explanation_limit{3'000};
  static constexpr Milliseconds farewell_limit{2'000};

  std::string described() const { return "Gloo's communicator '" + joined_.name + "'"; }

  /// Has the connection ended, of a rank that has not said farewell?
  bool is_cut_off(std::size_t w) const { return connections_->is_lost(w) && !has_left(w); }

  /// The store's part for notices, which answers within a limit or not at all.
  NoticeBoard board_within(Milliseconds limit) const {
    auto store = std::make_shared<Store>(joined_.store->share());
    store->set_timeout(limit);
    return {std::move(store), "gloo/" + joined_.name, joined_.rank};
  }
  /// Why a rank gave up; nothing if it has not said, or the store does not answer.
  std::optional<std::string> reason_of(std::size_t w) const {
    try {
      return reasons_board_.reason(w);
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  template <class Work>
  void make(const Call& call, std::optional<Rank> peer, const Work& work) {
    pending_.raise_fault();
    const BrokenPipesBlocked blocked;
    struct Entered {
      PendingCalls& pending;
      PendingCalls::Entry entry;
      ~Entered() { pending.end(entry); }
    };
    const Entered entered{pending_, pending_.begin(call, peer)};
    try {
      work(entered.entry);
    } catch (const Error& error) {
      fail(error);
    } catch (const std::exception& failure) {
      pending_.raise_explained(explanation_limit,
                               Error(call.text(), std::string("Gloo failed: ") + failure.what(),
                                     "look at the other ranks' output", rank()));
    }
    pending_.raise_fault();
  }

  /// All ranks compare the same greetings and name the same pair.
  void verify(const Call& call, const std::vector<Greeting>& greetings) const {
    for (std::size_t w = 0; w < greetings.size(); ++w) {
      if (greetings[w].state == Greeting::State::leaves)
        throw rank_left(call.text(), Rank{w}, rank());
      if (greetings[w].state == Greeting::State::gave_up)
        throw std::runtime_error("rank " + std::to_string(w) + " gave up");
    }
    const auto error = find_disagreement(
        greetings[0].number - 1, greetings.size(),
        [&](std::size_t w) -> const Call& { return greetings[w].call; }, rank());
    if (error) throw Error(*error);
  }

  JoinOptions joined_;
  std::atomic<Milliseconds> timeout_;
  NoticeBoard board_;
  NoticeBoard reasons_board_;
  std::shared_ptr<Connections> connections_;
  std::unique_ptr<RollCall> roll_;
  PendingCalls pending_;
  std::vector<std::string> reasons_;  // why ranks gave up
  std::optional<std::size_t> died_;   // a rank that ended without a word
  std::size_t groups_ = 0;
  TaskQueue queue_{call_thread};  // ends first: its calls use all of the above
};

/// The watchdog's look at Gloo's connections.
class Probe {
 public:
  using Engine = over_gloo::Engine;
  static constexpr ThreadName thread{"lockstep gloo", "the thread that watches Gloo's calls"};
  static constexpr const char* backend = "Backend<Gloo>";
  static constexpr Milliseconds tick{50};

  explicit Probe(Engine& engine) : engine_(engine) {}

  void poll() {
    const auto now = engine_.waiting();
    if (!now) return;
    const auto lacks = [&](std::size_t w) {
      return now->peer ? *now->peer == Rank{w} : !now->agreed;
    };
    if (const auto error = engine_.look_after(now->call.text(), lacks)) {
      engine_.fail(*error);
    } else if (engine_.pending().complains()) {
      sleep_for(Milliseconds(20));  // Gloo tells one buffer after the other
    }
  }

  Error time_over(const PendingCall& now) {
    std::vector<Rank> missing;
    if (now.peer) {
      missing = {*now.peer};
    } else if (!now.agreed) {
      missing = engine_.roll().silent();
    } else {
      missing = engine_.roll().say_farewell(Greeting::State::gave_up, last_words);
    }
    std::vector<std::string> names;
    names.reserve(missing.size());
    for (Rank rank : missing) names.push_back(std::to_string(rank.value()));
    return time_is_over(
        now.call.text(), engine_.timeout(),
        missing.empty() ? std::string("the network; all ranks are there") : listed_ranks(names),
        engine_.rank());
  }

 private:
  /// At the time limit, ranks that wait for another rank have this long to tell each other so.
  static constexpr Milliseconds last_words{400};

  Engine& engine_;
};

}  // namespace lockstep::detail::over_gloo

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
      engine().message(call.call(), call.root, [&](auto& messages) {
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
    engine().collective(call, [](auto&) {});
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
    const std::string name = engine().next_group_name() + "." + std::to_string(place.group);
    if (!place.is_member()) return std::nullopt;
    return std::optional<GlooCommunicator<GroupRanks>>(
        std::in_place, options_among(name, place.rank, place.world()));
  }

  /// A further communicator, of ranks of the job that need not be in this one. No other of the job
  /// has its name. **Ranks** its members. **Host** blocks until all have come.
  GlooCommunicator<> among(const std::string& name, Rank rank, WorldSize world) const {
    return GlooCommunicator<>(options_among(name, rank, world));
  }

 private:
  Engine& engine() const { return *engine_; }

  detail::over_gloo::JoinOptions options_among(std::string name, Rank rank, WorldSize world) const {
    const detail::over_gloo::JoinOptions& own = engine().joined();
    return {rank, world, std::move(name), own.store, own.device, timeout()};
  }

  /// Compares the call over ranks, and moves elements only if all make the same call.
  template <class C>
  static void execute_agreed(Engine& engine, const C& call) {
    engine.collective(call.call(), [&](auto& transport) {
      if constexpr (C::kind != detail::CollectiveKind::barrier)
        detail::execute_any(transport, call);
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

  detail::CallWatchdog<detail::over_gloo::Probe> engine_;  // ends before the memory that it uses
};

/// The Gloo communicator of a job's ranks. `name` tells several of one job apart. **Ranks** all.
/// **Host** blocks until all have come.
template <std::size_t Ranks = dynamic>
GlooCommunicator<Ranks> make_gloo_communicator(const Membership& member, Store& store,
                                               const std::string& name = "world") {
  return GlooCommunicator<Ranks>(member, store, name);
}

}  // namespace lockstep

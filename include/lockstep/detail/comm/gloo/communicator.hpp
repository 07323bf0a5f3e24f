// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Gloo>`'s communicator: through sockets, with errors that name the cause.

#include "lockstep/detail/comm/call/fault_channel.hpp"
#include "lockstep/detail/comm/call/library_engine.hpp"
#include "lockstep/detail/comm/collectives.hpp"
#include "lockstep/detail/comm/gloo/transport.hpp"
#include "lockstep/detail/topology/topology.hpp"

namespace lockstep::detail::over_gloo {

/// One rank's end of a communicator, whose name is unique in the job, and the watchdog's `Peers`.
class Engine : public LibraryEngine {
 public:
  static constexpr ThreadName thread{"lockstep gloo", "the thread that watches Gloo's calls"};
  static constexpr const char* backend = "Backend<Gloo>";
  static constexpr Milliseconds tick{50};

  /// **Ranks** all. **Host** blocks until all are connected.
  Engine(const Membership& member, const std::string& name, std::shared_ptr<Store> store,
         std::shared_ptr<::gloo::transport::Device> device)
      : LibraryEngine("gloo", member, name),
        store_(std::move(store)),
        device_(std::move(device)),
        channel_(channel_within(answer_limit)),
        reasons_channel_(channel_within(loss_limit)),
        connections_(std::make_shared<Connections>(member.rank, member.world)),
        reasons_(world()) {
    const std::string prefix = "lockstep/gloo/" + name + "/";
    try {
      store_->barrier(prefix + "all", rank(), member.world, member.timeout);
      connections_->connect(std::make_shared<RendezvousStore>(*store_, prefix, member_), device_,
                            member.timeout);
      handshake_ = std::make_unique<Handshake>(*connections_);
      // A rank that died while the others connected is named as in any call.
      if (const auto error =
              check_peers("joining " + described(), [](std::size_t) { return true; })) {
        fail(*error);
        throw Error(*error);
      }
      // Without this barrier, a rank that fails now would look like a network that cannot connect.
      store_->barrier(prefix + "connected", rank(), member.world, member.timeout);
    } catch (const Error& error) {
      throw error.on(rank());
    } catch (const std::exception& error) {
      throw Error(backend, std::string("the ranks cannot connect: ") + error.what(),
                  "let the hosts reach each other's ports, or set LOCKSTEP_INTERFACE to an "
                  "interface on which they do",
                  rank());
    }
  }
  /// The engine of another communicator of this rank, which shares Gloo's device.
  std::shared_ptr<Engine> beside(const std::string& name, Rank rank, WorldSize world) const {
    return std::make_shared<Engine>(LibraryEngine::beside(rank, world), name, store_, device_);
  }

  std::optional<PendingCall> waiting() const { return pending_.oldest(); }
  TaskQueue& queue() { return queue_; }

  /// Runs `work(transport)` if all make the same call, with which this rank's hello carries `data`.
  /// **Ranks** all, in order. **Host** blocks.
  template <class Work>
  void collective(const Call& call, std::span<const std::byte> data, const Work& work) {
    make(call, std::nullopt, handshake_->number(), [&](PendingCalls::Entry entry) {
      verify(call, handshake_->exchange(call, data));
      pending_.agree(entry);
      work(Transport(connections_, handshake_->number()));
    });
  }
  const Handshake& handshake() const { return *handshake_; }
  /// Does the data of this call travel with its comparison?
  template <class C>
  bool is_small(const C& call) const {
    const std::size_t given =
        call.count * sizeof(typename C::element) * (C::deals_pieces ? world() : 1);
    return given != 0 && given <= handshake_->most_carried();
  }

  /// Runs `work(transport)`, a message to or from one rank, without a comparison. **Host** blocks.
  template <class Work>
  void message(const Call& call, Rank peer, const Work& work) {
    make(call, peer, handshake_->count_message(call.kind, peer),
         [&](PendingCalls::Entry) { work(Transport(connections_, 0, OwnSlot::message)); });
  }

  /// Publishes the reason before it closes connections: a rank that notices the loss then finds it.
  void fail(const Error& error) {
    fail(error, text({error.is_consequence() ? because_of_another : "", error.text()}));
  }
  void fail(const Error& error, std::string_view reason) {
    try {
      if (world() != 1) channel_.give_reason(reason);
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): others find out by themselves then
    }
    pending_.note(error);
    connections_->abort();
  }
  /// Aborts the calls in flight, and publishes the reason.
  void give_up(std::string_view reason = ended_by_exception) {
    if (!is_broken()) fail(gave_up(described(), reason, rank()), reason);
  }

  // For the watchdog, and `Peers`: one thread at a time.

  void poll() {
    const auto now = waiting();
    if (!now) return;
    const auto lacks = [&](std::size_t w) { return has_left_without(w, *now); };
    if (const auto error = check_peers(now->call.text(), lacks)) {
      fail(*error);
    } else if (pending_.complains()) {
      sleep_for(Milliseconds(20));  // Gloo tells one buffer after the other
    }
  }

  Error time_over(const PendingCall& now) {
    std::vector<std::string> missing;
    if (now.peer) {
      missing.push_back(text({*now.peer}));
    } else {
      const auto silent = now.agreed
                              ? handshake_->send_shutdown(Hello::State::gave_up, shutdown_wait)
                              : handshake_->silent();
      for (const Rank rank : silent) missing.push_back(text({rank}));
    }
    return time_is_over(now.call, missing);
  }

  bool has_left(std::size_t w) const { return handshake_->shutdown_of(w).has_value(); }
  bool has_died(std::size_t w) const { return died_ == w; }
  static constexpr const char* how_died() { return " failed: its connection ended without a word"; }
  std::string abort_reason(std::size_t w) const { return reasons_[w]; }

  void drain() { queue_.drain(); }
  /// Closing sockets may lose messages, so this rank first waits for the others, up to a limit.
  void close() {
    if (!is_broken()) handshake_->send_shutdown(Hello::State::leaves, shutdown_limit);
  }
  /// `fail` has closed the connections already.
  static void abort() {}

 private:
  /// An error must come within a second of the timeout: two answers of the store fit.
  static constexpr Milliseconds answer_limit{400};
  /// A lost connection is noticed long before the timeout; on a busy host the store may be slow.
  static constexpr Milliseconds loss_limit{1'500};
  static constexpr Milliseconds explanation_limit{3'000};
  static constexpr Milliseconds shutdown_limit{2'000};
  /// At the timeout, ranks that wait for another rank have this long to tell each other so.
  static constexpr Milliseconds shutdown_wait{400};

  std::string described() const { return "Gloo's communicator '" + name_ + "'"; }

  FaultChannel channel_within(Milliseconds limit) const {
    auto store = std::make_shared<Store>(store_->share());
    store->set_timeout(limit);
    return {std::move(store), "gloo/" + name_, rank()};
  }

  /// The error that ends a wait, if any. A lost rank that has not left and gave no reason has died.
  template <class Lacks>
  std::optional<Error> check_peers(const std::string& operation, const Lacks& lacks) {
    for (std::size_t w = 0; w < world() && !died_; ++w) {
      if (!connections_->is_lost(w) || has_left(w)) continue;
      std::optional<std::string> reason;
      static_cast<void>(throws([&] { reason = reasons_channel_.reason(w); }));
      if (reason) {
        reasons_[w] = *reason;
      } else {
        died_ = w;
      }
    }
    return find_culprit(*this, operation, lacks);
  }

  /// Has a rank left without its part of a call? This rank's thread may have the result and not
  /// have run since, so that the call looks unfinished here: only the numbers tell.
  bool has_left_without(std::size_t w, const PendingCall& call) const {
    const auto last = handshake_->shutdown_of(w);
    if (!last || (call.peer && *call.peer != Rank{w})) return false;
    if (!call.peer) return last->number <= call.number;
    return call.number > (call.call.kind == CollectiveKind::send ? last->received : last->sent);
  }

  template <class Work>
  void make(const Call& call, std::optional<Rank> peer, std::uint64_t number, const Work& work) {
    pending_.raise_fault();
    const BrokenPipesBlocked blocked;
    const PendingCalls::Entry entry = pending_.begin(call, peer, number);
    const auto end = [entry](PendingCalls* pending) { pending->end(entry); };
    const std::unique_ptr<PendingCalls, decltype(end)> ended(&pending_, end);
    try {
      work(entry);
    } catch (const Error& error) {
      fail(error);
    } catch (const std::exception& failure) {
      pending_.raise_explained(explanation_limit,
                               Error(call.text(), std::string("Gloo failed: ") + failure.what(),
                                     "look at the other ranks' output", rank()));
    }
    pending_.raise_fault();
  }

  void verify(const Call& call, const std::vector<Hello>& hellos) const {
    for (std::size_t w = 0; w < hellos.size(); ++w) {
      if (hellos[w].state == Hello::State::leaves) throw rank_left(call.text(), Rank{w}, rank());
      if (hellos[w].state == Hello::State::gave_up)
        throw std::runtime_error(text({"rank ", w, " gave up"}));
    }
    const auto call_of = [&](std::size_t w) -> const Call& { return hellos[w].call; };
    const auto error = find_disagreement(hellos[0].number - 1, hellos.size(), call_of, rank());
    if (error) throw Error(*error);
  }

  std::shared_ptr<Store> store_;
  std::shared_ptr<::gloo::transport::Device> device_;
  FaultChannel channel_;
  FaultChannel reasons_channel_;
  std::shared_ptr<Connections> connections_;
  std::unique_ptr<Handshake> handshake_;
  std::vector<std::string> reasons_;  // why ranks gave up
  std::optional<std::size_t> died_;   // a rank that ended without a reason
  TaskQueue queue_{call_thread};      // ends first: its calls use all of the above
};

}  // namespace lockstep::detail::over_gloo

namespace lockstep {

/// Collectives through Gloo. Results are bitwise equal on all ranks and in every run with as many
/// ranks: small reductions, and all but all-reduces, are combined in rank order, large all-reduces
/// by Gloo's ring, unless they are of 16-bit floats. Calls are compared before anything is written.
/// A watchdog thread aborts on all ranks if a rank is gone or a call times out; later calls throw
/// that error. Another executes asynchronous calls, since Gloo's algorithms block. **Host** every
/// collective blocks until the result is here and arguments may be reused. **Stream** none: host
/// memory only.
template <std::size_t Ranks = dynamic>
class GlooCommunicator : public Collectives<GlooCommunicator<Ranks>>,
                         public detail::HostAllocating {
  using Engine = detail::over_gloo::Engine;

 public:
  /// Calls in flight have no limit; this number is large enough for every job.
  static constexpr std::size_t most_in_flight = 256;

  /// Joins the communicator of this name. **Ranks** all. **Host** blocks until all have joined.
  GlooCommunicator(const Membership& member, Store& store, const std::string& name = "world")
      : engine_(join(member, store, name)) {}
  /// The communicator of a group, for `split`.
  explicit GlooCommunicator(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  Rank rank() const { return engine_->rank(); }
  WorldSize world_size() const { return WorldSize{engine_->world()}; }
  std::chrono::milliseconds timeout() const { return engine_->timeout(); }
  void set_timeout(std::chrono::milliseconds timeout) { engine_->set_timeout(timeout); }
  void abort(std::string_view reason) { engine_->give_up(reason); }
  void give_up() { engine_->give_up(); }
  bool is_broken() const { return engine_->is_broken(); }

  // Called by `Collectives` and by adapters.

  template <class C>
  void perform(const C& call) {
    if constexpr (C::is_message) {
      engine_->message(call.call(), call.root, [&](const auto& messages) {
        detail::announce_message(messages, call);
        messages.execute(call);
      });
    } else {
      engine_->drain();
      execute_agreed(*engine_, call);
    }
  }

  void agree(const detail::Call& call) {
    engine_->drain();
    engine_->collective(call, {}, [](const auto&) {});
  }

  template <class C>
  auto start(const C& call) {
    engine_->pending().raise_fault();
    const auto make = [&engine = *engine_, call] { execute_agreed(engine, call); };
    return Work<detail::PendingInQueue<Engine, decltype(make)>>(std::in_place, *engine_, make);
  }

  template <std::size_t GroupRanks>
  std::optional<GlooCommunicator<GroupRanks>> split(const detail::GroupPosition& position) {
    agree(detail::division_call(position));
    const std::string name = engine_->next_group_name(position.group);
    std::optional<GlooCommunicator<GroupRanks>> group;
    if (position.is_member()) group.emplace(engine_->beside(name, position.rank, position.world()));
    return group;
  }

  template <class C>
  bool is_small(const C& call) const {
    return engine_->is_small(call);
  }

  /// A communicator, uniquely named, of any ranks. **Ranks** those. **Host** blocks until all join.
  GlooCommunicator<> among(const std::string& name, Rank rank, WorldSize world) const {
    return GlooCommunicator<>(engine_->beside(name, rank, world));
  }

 private:
  template <class C>
  static void execute_agreed(Engine& engine, const C& call) {
    if constexpr (C::kind == detail::CollectiveKind::barrier) {
      engine.collective(call.call(), {}, [](const auto&) {});
    } else {
      const bool small = engine.is_small(call);
      const auto carried = small ? std::as_bytes(call.in) : std::span<const std::byte>();
      engine.collective(call.call(), carried, [&](const auto& transport) {
        if (!small) return detail::execute_any(transport, call);
        const auto source = [&](std::size_t w) {
          return reinterpret_cast<const typename C::element*>(engine.handshake().carried_by(w));
        };
        detail::take_from_all<dynamic>(call, engine.rank(), engine.world(), source, call.count, 0,
                                       call.count);
      });
    }
  }

  static std::shared_ptr<Engine> join(const Membership& member, Store& store,
                                      const std::string& name) {
    detail::require_world<Ranks>(member.world, member.rank);
    const std::string known = detail::numbered_rendezvous(store, member.rank, "gloo", name);
    const std::string address =
        detail::over_gloo::listening_address(member, store, "lockstep/gloo/" + known + "/");
    return std::make_shared<Engine>(member, known, std::make_shared<Store>(store.share()),
                                    detail::over_gloo::make_device(address, member.rank));
  }

  detail::CallWatchdog<Engine> engine_;  // ends before the memory that it uses
};

/// Creates a job's communicator `name`. **Ranks** all. **Host** blocks until all have joined.
template <std::size_t Ranks = dynamic>
GlooCommunicator<Ranks> make_gloo_communicator(const Membership& member, Store& store,
                                               const std::string& name = "world") {
  return GlooCommunicator<Ranks>(member, store, name);
}

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Gloo>`'s communicator: collectives of ranks on any number of hosts, through
/// sockets.

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/backends/gloo/arguments.hpp"
#include "lockstep/comm/backends/gloo/endpoint.hpp"
#include "lockstep/comm/backends/gloo/interface.hpp"
#include "lockstep/comm/backends/gloo/message.hpp"
#include "lockstep/comm/backends/gloo/reduce.hpp"
#include "lockstep/comm/backends/gloo/transfer.hpp"
#include "lockstep/comm/queued_work.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/flat.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/host_arena.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/topology/world.hpp"

namespace lockstep {

/// Collectives through Gloo. Results are the same bits on all ranks and in every run with as many
/// ranks. Sums of 16-bit floats, and all of `reduce_scatter`, are combined in rank order; the rest
/// in the order of Gloo's ring.
///
/// Every call is compared over ranks before anything is written. A thread watches: a rank that is
/// gone, and a call that is not over at the time limit, end the communicator on all ranks with an
/// error, which every call throws from then on. Nothing hangs.
///
/// Asynchronous calls are made by another thread, in the order of posting. Gloo's algorithms block,
/// so there is no way to do without it.
///
/// Every collective, unless it says otherwise: **Ranks** all of them, in the same order. **Host**
/// blocks until the result is here and the arguments may be used again. **Stream** none: host
/// memory only.
template <std::size_t Ranks = dynamic>
class GlooCommunicator {
 public:
  using Milliseconds = over_gloo::Milliseconds;

  /// Any number of calls may be under way; this many are plenty.
  static constexpr std::size_t most_under_way = 256;

  /// Joins the job's communicator of this name. **Ranks** all. **Host** blocks until all have come.
  GlooCommunicator(const Membership& member, Store& store, const std::string& name = "world")
      : GlooCommunicator(seat(member, store, name)) {}

  explicit GlooCommunicator(over_gloo::Seat seat)
      : endpoint_(std::make_unique<over_gloo::Endpoint>(std::move(seat))) {}

  GlooCommunicator(GlooCommunicator&&) noexcept = default;
  GlooCommunicator& operator=(GlooCommunicator&&) = delete;

  Rank rank() const { return engine().rank(); }
  WorldSize world_size() const { return WorldSize{engine().world()}; }
  Milliseconds timeout() const { return engine().timeout(); }
  void set_timeout(Milliseconds timeout) { engine().set_timeout(timeout); }

  /// `count` elements, zeroed, for as long as the communicator lives. **Ranks** any.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    return {reinterpret_cast<T*>(arenas_.emplace_back(count * sizeof(T)).data()), count};
  }

  /// Gives up: every other rank's call fails with this reason.
  void abandon(std::string_view reason) {
    engine().fail(
        Error("Gloo's communicator '" + engine().seat().name + "'",
              "this rank gave it up: " + std::string(reason), "start the job again", rank()),
        reason);
  }

  /// The same when an exception has ended this rank's part, also while another thread is in a call.
  void give_up() { endpoint_->give_up(); }
  /// Has a call failed? Then all that follow do.
  bool is_broken() const { return endpoint_->is_broken(); }

  void barrier() { agree(Call{}); }

  /// A barrier with a time limit of its own, whose error lists every rank that is missing.
  void monitored_barrier(Milliseconds timeout) {
    const Milliseconds usual = engine().timeout();
    engine().set_timeout(timeout);
    barrier();
    engine().set_timeout(usual);
  }

  /// data = op over ranks, on all ranks.
  template <class Data, class Op = Sum>
  void all_reduce(Data&& data, Op op = {}) {
    const auto values = flat(data);
    make(reduction<Op>(CollectiveKind::all_reduce, values),
         [&] { over_gloo::all_reduce(engine(), values, op); });
  }

  /// The same, asynchronously. **Host** returns at once. The data belongs to the call until it is
  /// done.
  template <class Data, class Op = Sum>
  QueuedWork<over_gloo::Endpoint> all_reduce_async(Data&& data, Op op = {}) {
    const auto values = flat(data);
    const Call call = reduction<Op>(CollectiveKind::all_reduce, values);
    engine().ledger().raise_fault();
    return {*endpoint_, endpoint_->queue().post([&engine = engine(), call, values, op] {
              engine.collective(call, [&] { over_gloo::all_reduce(engine, values, op); });
            })};
  }

  /// On `root`, data = op over ranks; elsewhere it keeps what it was.
  template <class Data, class Op = Sum>
  void reduce(Data&& data, Rank root, Op op = {}) {
    const auto values = flat(data);
    make(reduction<Op>(CollectiveKind::reduce, values, root),
         [&] { over_gloo::reduce(engine(), values, root, op); });
  }

  /// data = root's data.
  template <class Data>
  void broadcast(Data&& data, Rank root) {
    const auto values = flat(data);
    make(describe(CollectiveKind::broadcast, values, root),
         [&] { over_gloo::broadcast(engine(), values, root); });
  }

  /// out = every rank's in, one behind the other.
  template <class In, class Out>
  void all_gather(const In& in, Out&& out) {
    const auto from = constant(flat(in));
    const auto to = flat(out);
    const Call call = describe(CollectiveKind::all_gather, from);
    over_gloo::check_size(engine(), call, to.size(), from.size() * engine().world());
    make(call, [&] { over_gloo::all_gather(engine(), from, to); });
  }

  /// On `root`, out = every rank's in; elsewhere out is not used.
  template <class In, class Out>
  void gather(const In& in, Out&& out, Rank root) {
    const auto from = constant(flat(in));
    const auto to = flat(out);
    const Call call = describe(CollectiveKind::gather, from, root);
    if (rank() == root)
      over_gloo::check_size(engine(), call, to.size(), from.size() * engine().world());
    make(call, [&] { over_gloo::gather(engine(), from, to, root); });
  }

  /// out = this rank's piece of root's in. Elsewhere in is not used.
  template <class In, class Out>
  void scatter(const In& in, Out&& out, Rank root) {
    const auto from = constant(flat(in));
    const auto to = flat(out);
    const Call call = describe(CollectiveKind::scatter, to, root);
    if (rank() == root)
      over_gloo::check_size(engine(), call, from.size(), to.size() * engine().world());
    make(call, [&] { over_gloo::scatter(engine(), from, to, root); });
  }

  /// out = op over ranks of this rank's piece of in.
  template <class In, class Out, class Op = Sum>
  void reduce_scatter(const In& in, Out&& out, Op op = {}) {
    const auto from = constant(flat(in));
    const auto to = flat(out);
    const Call call = reduction<Op>(CollectiveKind::reduce_scatter, to);
    over_gloo::check_size(engine(), call, from.size(), to.size() * engine().world());
    make(call, [&] { over_gloo::reduce_scatter(engine(), from, to, op); });
  }

  /// Piece w of out = piece `rank` of rank w's in.
  template <class In, class Out>
  void all_to_all(const In& in, Out&& out) {
    const auto from = constant(flat(in));
    const auto to = flat(out);
    const Call call = describe(CollectiveKind::all_to_all, from);
    over_gloo::check_size(engine(), call, from.size() % engine().world(), 0);
    over_gloo::check_size(engine(), call, to.size(), from.size());
    make(call, [&] { over_gloo::all_to_all(engine(), from, to); });
  }

  /// Sends elements to one rank. **Ranks** this one, and `to` calls `receive`. **Host** blocks
  /// until it has: two ranks that both send first wait for each other.
  template <class Data>
  void send(const Data& data, Rank to) {
    const auto values = constant(flat(data));
    over_gloo::check_peer(engine(), "send", to);
    over_gloo::send(engine(), describe(CollectiveKind::send, values, to), std::as_bytes(values),
                    to);
  }

  /// Receives elements from one rank. **Ranks** this one, and `from` calls `send` with the same
  /// type and count. **Host** blocks until they are here.
  template <class Data>
  void receive(Data&& data, Rank from) {
    const auto values = flat(data);
    over_gloo::check_peer(engine(), "receive", from);
    over_gloo::receive(engine(), describe(CollectiveKind::send, values, rank()),
                       std::as_writable_bytes(values), from);
  }

  over_gloo::Engine& engine() const { return endpoint_->engine(); }

  /// Compares a call over ranks that is made by other means. **Ranks** all. **Host** blocks until
  /// all have come.
  void agree(const Call& call) {
    make(call, [] {});
  }

  /// Makes a call on this thread, behind all that are under way. **Ranks** all. **Host** blocks.
  template <class Work>
  void make(const Call& call, const Work& work) {
    endpoint_->queue().drain();
    engine().collective(call, work);
  }

 private:
  static over_gloo::Seat seat(const Membership& member, Store& store, const std::string& name) {
    require_world<Ranks>(member.world, member.rank);
    // Joined again under the same name, it is another communicator.
    const std::string count =
        "lockstep/gloo/" + name + "/joined/" + std::to_string(member.rank.value());
    const std::string known = name + "." + std::to_string(store.add(count, 1));
    const std::string address =
        over_gloo::listening_address(member, store, "lockstep/gloo/" + known + "/");
    return {member.rank,
            member.world,
            known,
            std::make_shared<Store>(member.host, member.port, member.secret, member.timeout),
            over_gloo::make_device(address, member.rank),
            member.timeout};
  }

  template <class T>
  static std::span<const std::remove_const_t<T>> constant(std::span<T> values) {
    return values;
  }

  template <class U>
  Call describe(CollectiveKind kind, std::span<U> data, Rank root = Rank{0}) const {
    return over_gloo::describe(engine(), kind, data, root);
  }
  template <class Op, class T>
  Call reduction(CollectiveKind kind, std::span<T> data, Rank root = Rank{0}) const {
    static_assert(ReduceOp<Op, T>,
                  "lockstep: this reduce operation is not defined for these elements");
    return over_gloo::describe(engine(), kind, data, root, Op::name);
  }

  std::deque<HostArena> arenas_;
  std::unique_ptr<over_gloo::Endpoint> endpoint_;  // ends before the memory that it uses
};

static_assert(ArenaAllocating<GlooCommunicator<>> && AsyncReducing<GlooCommunicator<2>>);
static_assert(ReduceScattering<GlooCommunicator<>> && Scattering<GlooCommunicator<>> &&
              Messaging<GlooCommunicator<>>);

/// The Gloo communicator of a job's ranks. `name` tells several of one job apart. **Ranks** all.
/// **Host** blocks until all have come.
template <std::size_t Ranks = dynamic>
GlooCommunicator<Ranks> make_gloo_communicator(const Membership& member, Store& store,
                                               const std::string& name = "world") {
  return GlooCommunicator<Ranks>(member, store, name);
}

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Hierarchical<...>>`'s communicator: one kind of communicator inside a host,
/// another between hosts.

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/adapters/hierarchical/stages.hpp"
#include "lockstep/comm/queued_work.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/flat.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep {

/// All-reduces go in three stages: reduced inside each host, each piece between hosts, gathered
/// inside. What crosses the network is the data once for each host, not once for each rank, and all
/// ranks carry the same share of it. Results are the same bits on all ranks. Everything else goes
/// flat: through the network alone, or through both where no one communicator joins all ranks.
///
/// A failure in one stage ends all of them, on all ranks.
///
/// Every collective, unless it says otherwise: **Ranks** all of them, in the same order. **Host**
/// blocks until the result is here and the arguments may be used again. **Stream** none.
template <Communicator Inside, Communicator Between, class Flat = Between>
class HierarchicalCommunicator {
  using Stages = lockstep::Stages<Inside, Between, Flat>;

 public:
  using Milliseconds = std::chrono::milliseconds;

  /// Any number of calls may be under way; this many are plenty.
  static constexpr std::size_t most_under_way = 256;

  explicit HierarchicalCommunicator(std::unique_ptr<Stages> stages) : stages_(std::move(stages)) {}

  Rank rank() const { return stages_->flat().rank(); }
  WorldSize world_size() const { return stages_->flat().world_size(); }
  Milliseconds timeout() const { return stages_->flat().timeout(); }
  void set_timeout(Milliseconds timeout) {
    stages_->inside().set_timeout(timeout + inside_patience);
    stages_->between().set_timeout(timeout);
    stages_->flat().set_timeout(timeout);
  }

  /// `count` elements that the inside communicates best. Ranks: all, with the same count.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    stages_->queue().drain();
    return stages_->inside().template allocate<T>(count);
  }

  /// Gives up: every other rank's call fails with this reason.
  void abandon(std::string_view reason) {
    stages_->queue().drain();
    stages_->abandon(reason);
  }

  /// The same when an exception has ended this rank's part, also while another thread is in a call.
  void give_up() { stages_->give_up(); }
  /// Has a call failed? Then all that follow do.
  bool is_broken() const { return stages_->is_broken(); }

  /// Throws what went wrong between hosts, if anything has. **Ranks** this one.
  void raise_fault()
    requires requires(Between& between) { between.raise_fault(); }
  {
    stages_->between().raise_fault();
  }

  /// Compares a call over ranks that is made by other means. **Ranks** all. **Host** blocks until
  /// all have come.
  void agree(const Call& call) {
    stages_->queue().drain();
    stages_->compare(call);
  }

  void barrier() {
    through_flat([](Flat& flat) { flat.barrier(); });
  }
  /// A barrier with a time limit of its own, whose error lists every rank that is missing.
  void monitored_barrier(Milliseconds timeout) {
    through_flat([&](Flat& flat) { flat.monitored_barrier(timeout); });
  }

  /// data = op over ranks, on all ranks.
  template <class Data, class Op = Sum>
  void all_reduce(Data&& data, Op op = {}) {
    const auto values = flat(data);
    const Call call = describe<Op>(values);
    if (!Stages::takes(values))
      return through_flat([&](Flat& flat) { flat.all_reduce(values, op); });
    stages_->queue().drain();
    stages_->all_reduce(call, values, op);
  }

  /// The same, asynchronously. **Host** returns at once. The data belongs to the call until it is
  /// done.
  template <class Data, class Op = Sum>
  QueuedWork<Stages> all_reduce_async(Data&& data, Op op = {}) {
    const auto values = flat(data);
    const Call call = describe<Op>(values);
    return {*stages_, stages_->queue().post([stages = stages_.get(), call, values, op] {
              stages->all_reduce(call, values, op);
            })};
  }

  /// On `root`, data = op over ranks; elsewhere it keeps what it was.
  template <class Data, class Op = Sum>
  void reduce(Data&& data, Rank root, Op op = {}) {
    through_flat([&](Flat& flat) { flat.reduce(data, root, op); });
  }

  /// data = root's data.
  template <class Data>
  void broadcast(Data&& data, Rank root) {
    through_flat([&](Flat& flat) { flat.broadcast(data, root); });
  }

  /// out = every rank's in, one behind the other.
  template <class In, class Out>
  void all_gather(const In& in, Out&& out) {
    through_flat([&](Flat& flat) { flat.all_gather(in, out); });
  }

  /// On `root`, out = every rank's in; elsewhere out is not used.
  template <class In, class Out>
  void gather(const In& in, Out&& out, Rank root) {
    through_flat([&](Flat& flat) { flat.gather(in, out, root); });
  }

  /// out = this rank's piece of root's in. Elsewhere in is not used.
  template <class In, class Out>
  void scatter(const In& in, Out&& out, Rank root) {
    through_flat([&](Flat& flat) { flat.scatter(in, out, root); });
  }

  /// out = op over ranks of this rank's piece of in.
  template <class In, class Out, class Op = Sum>
  void reduce_scatter(const In& in, Out&& out, Op op = {}) {
    through_flat([&](Flat& flat) { flat.reduce_scatter(in, out, op); });
  }

  /// Piece w of out = piece `rank` of rank w's in.
  template <class In, class Out>
  void all_to_all(const In& in, Out&& out) {
    through_flat([&](Flat& flat) { flat.all_to_all(in, out); });
  }

  /// Sends elements to one rank. **Ranks** this one, and `to` calls `receive`. **Host** blocks.
  template <class Data>
  void send(const Data& data, Rank to) {
    stages_->flat().send(data, to);
  }

  /// Receives elements from one rank. **Ranks** this one, and `from` calls `send` with the same
  /// type and count. **Host** blocks until they are here.
  template <class Data>
  void receive(Data&& data, Rank from) {
    stages_->flat().receive(data, from);
  }

 private:
  template <class Op, class T>
  static Call describe(std::span<T> values) {
    static_assert(ReduceOp<Op, T>,
                  "lockstep: this reduce operation is not defined for these elements");
    return make_call<T>(CollectiveKind::all_reduce, values.size(), false, 0, Op::name);
  }

  /// A failure there names ranks as they are: it needs no words about where it was.
  template <class F>
  void through_flat(const F& f) {
    stages_->queue().drain();
    try {
      f(stages_->flat());
    } catch (const Error& error) {
      stages_->abandon(error.text());
      throw;
    }
  }

  std::unique_ptr<Stages> stages_;
};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The communicators of a hierarchy, and the all-reduce in three stages.

#include <concepts>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/comm/adapters/hierarchical/hosts.hpp"
#include "lockstep/comm/adapters/hierarchical/scratch.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/combining.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/fault/first_fault.hpp"
#include "lockstep/comm/fault/sentences.hpp"
#include "lockstep/comm/passes.hpp"
#include "lockstep/comm/waiting/queue.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

/// `Inside` joins the ranks of a host, `Between` the ranks that have the same place on every host,
/// `Flat` all ranks. Used by one thread at a time. **Stream** where the three communicators are
/// ordered by a stream, every call here is too.
template <Communicator Inside, Communicator Between, class Flat = Between>
class Stages {
 public:
  Stages(Hosts hosts, Inside inside, Between between, Flat flat)
      : hosts_(std::move(hosts)),
        inside_(std::move(inside)),
        between_(std::move(between)),
        flat_(std::move(flat)) {}
  /// Without a flat communicator: all ranks are reached through the other two.
  /// `name` is another for each hierarchy of a job.
  Stages(Hosts hosts, Inside inside, Between between, std::string name = "hierarchy")
    requires std::constructible_from<Flat, const Hosts&, Inside&, Between&>
      : name_(std::move(name)),
        hosts_(std::move(hosts)),
        inside_(std::move(inside)),
        between_(std::move(between)),
        flat_(hosts_, inside_, between_) {}
  Stages(const Stages&) = delete;
  Stages& operator=(const Stages&) = delete;
  ~Stages() { queue_.drain(); }

  const Hosts& hosts() const { return hosts_; }
  std::string next_group_name() { return name_ + "/" + std::to_string(groups_++); }
  Inside& inside() { return inside_; }
  Between& between() { return between_; }
  Flat& flat() { return flat_; }
  Queue& queue() { return queue_; }

  bool is_broken() const { return fault_.is_set(); }
  void raise_fault() const { fault_.raise(); }

  /// Gives up: every other rank's call fails with this reason. **Ranks** this one, with nothing
  /// under way.
  void abandon(std::string_view reason) {
    fault_.note(gave_up("the hierarchy", std::string(reason), flat_.rank()));
    flat_.abandon(reason);
    between_.abandon(reason);
    inside_.abandon(reason);
  }
  /// Gives up while another thread may be in a call, which ends with the network's connections.
  void give_up() {
    fault_.note(gave_up("the hierarchy", ended_by_exception, flat_.rank()));
    between_.abandon(ended_by_exception);
    flat_.abandon(ended_by_exception);
  }

  /// Makes a call of all ranks. Its errors need no translation of rank numbers.
  template <class F>
  void through_flat(const F& make) {
    fault_.raise();
    try {
      make(flat_);
    } catch (const Error& error) {
      fail(error);
    }
  }

  /// Reduces inside the host, so that each rank has a piece; reduces each piece between hosts, so
  /// that every rank uses its share of the network; then gathers inside the host.
  template <class T, class Op>
  void all_reduce(const calls::AllReduce<T, Op>& call) {
    using Value = Prepared<T, Op>;
    fault_.raise();
    const std::size_t ranks = inside_.world_size().value();
    const std::size_t length = (call.count + ranks - 1) / ranks;
    const bool divides = length * ranks == call.count;
    const Call described = call.call();
    // Different calls can have equal pieces, so whole calls are compared first.
    stage(Part::flat, described, [&] { flat_.agree(described); });
    const std::span<Value> piece = allocate<Value>(described, pieces_, length);
    reduce_inside(described, call, piece, divides);
    stage(Part::between, described, [&] { between_.all_reduce(piece, Combining<Op>(call.op)); });
    const std::span<T> finished = allocate<T>(described, finished_, length);
    passes_of(inside_).finish(std::span<const Value>(piece), finished, call.op,
                              flat_.world_size().value());
    if (divides) {
      stage(Part::inside, described, [&] { inside_.all_gather(finished, call.out); });
    } else {
      const std::span<T> all = allocate<T>(described, gathered_, length * ranks);
      stage(Part::inside, described, [&] { inside_.all_gather(finished, all); });
      passes_of(inside_).copy(std::span<const T>(all).first(call.count), call.out);
    }
  }

 private:
  enum class Part { inside, between, flat };

  /// Runs one stage of a call. If it fails, all stages fail on all ranks. Errors inside and between
  /// hosts count ranks from 0, so the error adds which ranks of the job these are.
  template <class F>
  void stage(Part part, const Call& call, const F& f) {
    try {
      f();
    } catch (const Error& error) {
      const std::string where = part == Part::inside    ? hosts_.words_inside(flat_.rank())
                                : part == Part::between ? hosts_.words_between(flat_.rank())
                                                        : "";
      const Error named(call.text(), where + error.operation() + ": " + error.problem(),
                        error.advice(), flat_.rank());
      fail(error.is_consequence() ? named.as_consequence() : named);
    }
  }

  [[noreturn]] void fail(const Error& error) {
    fault_.note(error);
    abandon(error.text());
    throw Error(error);
  }

  template <class T>
  std::span<T> allocate(const Call& call, Scratch& scratch, std::size_t count) {
    std::span<T> memory;
    stage(Part::inside, call, [&] { memory = scratch.from<T>(inside_, count); });
    return memory;
  }

  /// piece = this rank's piece of the data of the host's ranks, combined. Data that needs no
  /// preparation and divides evenly is read in place.
  template <class T, class Value, class Op>
  void reduce_inside(const Call& described, const calls::AllReduce<T, Op>& call,
                     std::span<Value> piece, bool divides) {
    const Combining<Op> combining(call.op);
    if constexpr (std::same_as<T, Value> && !requires { call.op.factor; }) {
      if (divides) {
        stage(Part::inside, described, [&] { inside_.reduce_scatter(call.in, piece, combining); });
        return;
      }
    }
    const std::size_t count = piece.size() * inside_.world_size().value();
    const std::span<Value> prepared = allocate<Value>(described, prepared_, count);
    passes_of(inside_).prepare(call.in, prepared, call.op);
    stage(Part::inside, described, [&] { inside_.reduce_scatter(prepared, piece, combining); });
  }

  std::string name_;
  std::size_t groups_ = 0;  // that were made of this hierarchy
  Hosts hosts_;
  Inside inside_;
  Between between_;
  Flat flat_;
  Scratch pieces_;
  Scratch prepared_;
  Scratch finished_;
  Scratch gathered_;
  FirstFault fault_;
  Queue queue_;
};

}  // namespace lockstep::detail

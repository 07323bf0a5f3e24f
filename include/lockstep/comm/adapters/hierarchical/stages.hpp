// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The communicators of a hierarchy, and the all-reduce in three stages.

#include <atomic>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/adapters/hierarchical/combining.hpp"
#include "lockstep/comm/adapters/hierarchical/hosts.hpp"
#include "lockstep/comm/passes.hpp"
#include "lockstep/comm/waiting/queue.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep {

/// Inside a host, between the ranks that have the same place on every host, and flat: all of them.
/// One thread at a time. **Stream** where the three are ordered by a stream, so is every call here.
template <Communicator Inside, Communicator Between, class Flat = Between>
class Stages {
 public:
  Stages(Hosts hosts, Inside inside, Between between, Flat flat)
      : hosts_(std::move(hosts)),
        inside_(std::move(inside)),
        between_(std::move(between)),
        flat_(std::move(flat)) {}

  /// All ranks are reached through the other two.
  Stages(Hosts hosts, Inside inside, Between between)
    requires std::constructible_from<Flat, const Hosts&, Inside&, Between&>
      : hosts_(std::move(hosts)),
        inside_(std::move(inside)),
        between_(std::move(between)),
        flat_(hosts_, inside_, between_) {}

  Stages(const Stages&) = delete;
  Stages& operator=(const Stages&) = delete;
  ~Stages() { queue_.drain(); }

  Inside& inside() { return inside_; }
  Between& between() { return between_; }
  Flat& flat() { return flat_; }
  Queue& queue() { return queue_; }

  bool is_broken() const { return broken_.load(std::memory_order_acquire); }

  /// Gives up: every other rank's call fails with this reason. **Ranks** this one, with nothing
  /// under way.
  void abandon(std::string_view reason) {
    broken_.store(true, std::memory_order_release);
    flat_.abandon(reason);
    between_.abandon(reason);
    inside_.abandon(reason);
  }
  /// The same while another thread may be in a call: the network ends it, here or on another rank.
  void give_up() {
    broken_.store(true, std::memory_order_release);
    between_.abandon("it ended with an exception");
    flat_.abandon("it ended with an exception");
  }

  /// Throws on all ranks unless all make this call: at once, or as soon as it is known.
  void compare(const Call& call) {
    if constexpr (requires { flat_.agree(call); }) {
      stage(Part::flat, call, [&] { flat_.agree(call); });
    } else if constexpr (requires {
                           inside_.agree(call);
                           between_.agree(call);
                         }) {
      stage(Part::inside, call, [&] { inside_.agree(call); });
      stage(Part::between, call, [&] { between_.agree(call); });
    } else {
      stage(Part::flat, call, [&] { compare_gathered(call); });
    }
  }

  /// Can the stages work on this memory? What they cannot goes flat.
  template <class T>
  static bool takes(std::span<T> data) {
    return data.empty() || Passes<Inside>::takes(data.data());
  }

  /// Reduces inside the host, so that each rank has a piece; each piece between the hosts, so that
  /// every rank carries its share of the network; and gathers inside.
  template <class T, class Op>
  void all_reduce(const Call& call, std::span<T> data, const Op& op) {
    using Value = Prepared<T, Op>;
    const std::size_t ranks = inside_.world_size().value();
    const std::size_t length = (data.size() + ranks - 1) / ranks;
    const bool divides = length * ranks == data.size();
    compare(call);  // calls that differ can have pieces that do not
    const std::span<Value> piece = arena<Value>(call, pieces_, length);
    reduce_inside(call, data, piece, op, divides);
    stage(Part::between, call, [&] { between_.all_reduce(piece, Combining<Op>(op)); });
    const std::span<T> finished = finish<T>(call, piece, op);
    if (divides) {
      stage(Part::inside, call, [&] { inside_.all_gather(finished, data); });
    } else {
      const std::span<T> all = arena<T>(call, gathered_, length * ranks);
      stage(Part::inside, call, [&] { inside_.all_gather(finished, all); });
      Passes<Inside>::copy(inside_, all.first(data.size()), data);
    }
  }

 private:
  enum class Part { inside, between, flat };

  /// Runs one stage of a call. If it fails, so do all others, on all ranks.
  template <class F>
  void stage(Part part, const Call& call, const F& f) {
    try {
      f();
    } catch (const Error& error) {
      const Error named(call.text(), where(part) + error.operation() + ": " + error.problem(),
                        error.advice(), flat_.rank());
      abandon(named.text());
      throw error.is_consequence() ? named.as_consequence() : named;
    }
  }

  std::string where(Part part) const {
    if (part == Part::inside) return hosts_.words_inside(flat_.rank());
    if (part == Part::between) return hosts_.words_between(flat_.rank());
    return "";
  }

  /// Memory of the inside that grows as it must.
  struct Arena {
    std::span<std::uint8_t> bytes;
  };

  template <class T>
  std::span<T> arena(const Call& call, Arena& arena, std::size_t count) {
    if (arena.bytes.size() < count * sizeof(T)) {
      stage(Part::inside, call, [&] {
        arena.bytes = inside_.template allocate<std::uint8_t>(std::bit_ceil(count * sizeof(T)));
      });
    }
    return {reinterpret_cast<T*>(arena.bytes.data()), count};
  }

  /// piece = this rank's piece of the host's data, combined. Data that needs no preparation and
  /// divides is read where it lies.
  template <class T, class Value, class Op>
  void reduce_inside(const Call& call, std::span<T> data, std::span<Value> piece, const Op& op,
                     bool divides) {
    const Combining<Op> combining(op);
    if constexpr (std::same_as<T, Value> && !requires { op.factor; }) {
      if (divides) {
        stage(Part::inside, call, [&] { inside_.reduce_scatter(data, piece, combining); });
        return;
      }
    }
    const std::size_t count = piece.size() * inside_.world_size().value();
    const std::span<Value> prepared = arena<Value>(call, prepared_, count);
    Passes<Inside>::prepare(inside_, data, prepared, op);
    stage(Part::inside, call, [&] { inside_.reduce_scatter(prepared, piece, combining); });
  }

  template <class T, class Value, class Op>
  std::span<T> finish(const Call& call, std::span<Value> piece, const Op& op) {
    const std::span<T> finished = arena<T>(call, finished_, piece.size());
    Passes<Inside>::finish(inside_, piece, finished, op, flat_.world_size().value());
    return finished;
  }

  void compare_gathered(const Call& call) {
    std::vector<std::uint8_t> all(sizeof call * flat_.world_size().value());
    flat_.all_gather(std::span(reinterpret_cast<const std::uint8_t*>(&call), sizeof call), all);
    for (std::size_t w = 1; w < flat_.world_size().value(); ++w) {
      Call first;
      Call other;
      std::memcpy(&first, all.data(), sizeof first);
      std::memcpy(&other, all.data() + w * sizeof other, sizeof other);
      if (first == other) continue;
      throw Error(call.text(),
                  "ranks disagree: rank 0 called " + first.text() + " and rank " +
                      std::to_string(w) + " called " + other.text(),
                  "let every rank make the same calls in the same order", flat_.rank());
    }
  }

  Hosts hosts_;
  Inside inside_;
  Between between_;
  Flat flat_;
  Arena pieces_;
  Arena prepared_;
  Arena finished_;
  Arena gathered_;
  std::atomic<bool> broken_ = false;
  Queue queue_;
};

}  // namespace lockstep

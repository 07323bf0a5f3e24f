// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Rendezvous of threads of one process: the last rank to announce a call works for all.

#include <unistd.h>

#include "lockstep/detail/comm/call/peers.hpp"
#include "lockstep/detail/comm/combine.hpp"

namespace lockstep::detail::threads {

/// The most calls in flight.
inline constexpr std::size_t ring = 32;

/// A rank's arguments of a call: pointers, because ranks share an address space.
struct CallArguments {
  const void* in = nullptr;
  void* out = nullptr;
  void* event = nullptr;  // the rank's memory may be used after this event
  bool on_host = false;   // the memory is host memory
};

/// State shared by all ranks, used through one `RankHandle` each. Every rank announces its calls in
/// the same order. A call costs one wait, an asynchronous one none until its result is needed.
class Rendezvous {
 public:
  explicit Rendezvous(WorldSize world)
      : ranks_(world.value()), boxes_(world.value() * world.value()) {
    for (Slot& slot : slots_) {
      slot.calls.resize(world.value());
      slot.arguments.resize(world.value());
    }
  }

  std::size_t world() const { return ranks_.size(); }

  /// Resets all calls, messages and faults. No rank may be in a call.
  void restore() {
    for (Box& box : boxes_) box.sent.value = box.taken.value = 0;
    for (RankState& rank : ranks_) rank.arrived.value = rank.failed = rank.has_reason = 0;
    for (Slot& slot : slots_) slot.arrived = 0;
    done_.value = 0;
    disagreement_.reset();
  }

 private:
  friend class RankHandle;

  struct alignas(line_pair) Slot {
    std::atomic<std::size_t> arrived{0};
    std::vector<Call> calls;
    std::vector<CallArguments> arguments;
  };

  /// The mailbox of a pair of ranks: holds one message, until the receiver has taken it.
  struct Box {
    Counter sent{};
    Counter taken{};
    Call call;
    CallArguments arguments;
  };
  Box& box(Rank from, Rank to) { return boxes_[from.value() * world() + to.value()]; }

  std::vector<RankState> ranks_;
  std::vector<Box> boxes_;
  std::array<Slot, ring> slots_;
  Counter done_{};  // completed calls
  /// Held by the rank that works for all and by one that gives up, whose memory is not used later.
  std::mutex working_;
  std::optional<Error> disagreement_;  // guarded by `working_`
};

/// Used by the rank's own thread only.
class RankHandle : public SharedPeers {
 public:
  RankHandle(std::shared_ptr<Rendezvous> rendezvous, const GroupMember& member,
             Milliseconds timeout)
      : SharedPeers("shm", member, rendezvous->ranks_.data(), sizeof(RankState), timeout, -1,
                    &rendezvous->working_, &rendezvous->done_),
        rendezvous_(std::move(rendezvous)) {
    if (own().process.exchange(static_cast<std::uint32_t>(::getpid())) != 0) {
      throw Error("join", text({"another thread has joined as rank ", member.rank}),
                  "give every thread its own rank", member.rank);
    }
  }
  /// A rank of a job of its own.
  RankHandle(const std::shared_ptr<Rendezvous>& rendezvous, Rank rank, Milliseconds timeout)
      : RankHandle(rendezvous, {"world", rank, WorldSize{rendezvous->world()}, rank}, timeout) {}
  RankHandle(const RankHandle&) = delete;
  RankHandle& operator=(const RankHandle&) = delete;

  ~RankHandle() { leave(); }

  /// In a capture ranks take turns: each holds `mutex` except while it waits for others.
  void take_turns(std::mutex* mutex) { turns_ = mutex; }

  /// Announces a call and returns its number. `bring(ticket)` gives this rank's arguments once a
  /// slot is free. The last rank compares the calls and runs `work(arguments, ticket)`.
  template <class Bring, class Work>
  std::uint64_t announce(const Call& call, const Bring& bring, const Work& work) {
    raise_fault();
    const std::uint64_t ticket = announced();
    if (ticket >= ring) wait(ticket - ring, call);
    Rendezvous::Slot& slot = rendezvous_->slots_[ticket % ring];
    slot.calls[rank().value()] = call;
    slot.arguments[rank().value()] = bring(ticket);
    records_[ticket % ring] = recorder().schedule(call);
    own().arrived.value.store(ticket + 1, std::memory_order_release);
    if (slot.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == world()) {
      slot.arrived.store(0, std::memory_order_relaxed);
      compare(slot, ticket);
      work_on(call, std::nullopt, [&] { work(std::span(slot.arguments), ticket); });
      publish(rendezvous_->done_, ticket + 1);
    }
    return ticket;
  }

  template <class Work>
  void rendezvous(const Call& call, const CallArguments& arguments, const Work& work) {
    wait(announce(
             call, [&](std::uint64_t) { return arguments; },
             [&](std::span<const CallArguments> arguments, std::uint64_t) { work(arguments); }),
         call);
  }

  std::uint64_t announced() const { return own().arrived.value.load(std::memory_order_relaxed); }
  bool is_done(std::uint64_t ticket) const { return reached(rendezvous_->done_, ticket + 1); }

  /// **Host** blocks until the call's work is done.
  void wait(std::uint64_t ticket, const Call& call) {
    await(rendezvous_->done_, ticket + 1, call, std::nullopt);
    recorder().complete(records_[ticket % ring]);
  }

  /// The same for a caller that polls: is the call's work done? Throws what `wait` would.
  bool test(std::uint64_t ticket, const Call& call) {
    if (is_done(ticket)) {
      end_poll();
      recorder().complete(records_[ticket % ring]);
      return true;
    }
    poll(rendezvous_->done_, ticket + 1, call, std::nullopt,
         [&](const Error& error) { fail_together(error); });
    return false;
  }

  /// Waits for a counter, checking the other ranks and the timeout.
  void await(Counter& counter, std::uint64_t value, const Call& call, std::optional<Rank> one) {
    if (reached(counter, value)) return;
    const auto take_back = [](std::mutex* turns) { turns->lock(); };
    const std::unique_ptr<std::mutex, decltype(take_back)> given_up(turns_, take_back);
    if (turns_ != nullptr) turns_->unlock();
    SharedPeers::await(counter, value, call, one,
                       [&](const Error& error) { fail_together(error); });
  }

  /// Publishes a message and waits until the receiver has taken it. Returns the receiver's event.
  void* send(const Call& call, const CallArguments& arguments, Rank to) {
    Rendezvous::Box& box = rendezvous_->box(rank(), to);
    const std::uint64_t message = box.sent.value.load(std::memory_order_relaxed) + 1;
    box.call = call;
    box.arguments = arguments;
    const std::uint64_t record = recorder().schedule(call);
    publish(box.sent, message);
    await(box.taken, message, call, to);
    recorder().complete(record);
    return box.arguments.event;
  }

  /// Waits for a message and copies it by `take(arguments)`, which returns an event for it.
  template <class Take>
  void receive(const Call& call, bool on_host, Rank from, const Take& take) {
    Rendezvous::Box& box = rendezvous_->box(from, rank());
    const std::uint64_t message = box.taken.value.load(std::memory_order_relaxed) + 1;
    const std::uint64_t record = recorder().schedule(call);
    await(box.sent, message, call, from);
    work_on(call, from, [&] {
      const bool same = box.call.carries_the_same_as(call);
      if (!same || box.arguments.on_host != on_host)
        throw messages_differ(call, from, call_text(box.call, box.arguments, same), rank());
      box.arguments.event = take(box.arguments);
    });
    publish(box.taken, message);
    recorder().complete(record);
  }

 private:
  /// Works on the memory of one rank or of all, unless one has left. A failure fails all ranks.
  template <class Work>
  void work_on(const Call& call, std::optional<Rank> one, const Work& work) {
    std::unique_lock working(rendezvous_->working_);
    for (std::size_t w = 0; w < world(); ++w) {
      if (one.value_or(Rank{w}) != Rank{w} || (state(w).failed == 0 && state(w).left == 0))
        continue;
      working.unlock();
      if (const auto error = check(call, Rank{w}, 0, Clock::duration::zero()))
        fail_together(*error);
      fail(
          Error(call.text(), text({"rank ", w, " has given up"}), "look at that rank first", rank())
              .as_consequence());
    }
    try {
      work();
    } catch (const Error& error) {
      working.unlock();
      give_up(error, error.text());
      throw;
    } catch (const std::exception& error) {
      working.unlock();
      abort(error.what());
      throw;
    }
  }

  static std::string call_text(const Call& call, const CallArguments& arguments, bool with_memory) {
    if (!with_memory) return call.text();
    return call.text() + (arguments.on_host ? " in host memory" : " in device memory");
  }

  /// Compares all ranks' calls before any memory is touched.
  void compare(const Rendezvous::Slot& slot, std::uint64_t ticket) {
    const auto& calls = slot.calls;
    const auto& arguments = slot.arguments;
    std::size_t other = 1;
    while (other < world() && calls[other] == calls[0] &&
           arguments[other].on_host == arguments[0].on_host)
      ++other;
    if (other == world()) return;
    const bool same = calls[other] == calls[0];
    const Error error = ranks_disagree(ticket, call_text(calls[0], arguments[0], same), Rank{other},
                                       call_text(calls[other], arguments[other], same), rank());
    {
      const std::lock_guard working(rendezvous_->working_);
      rendezvous_->disagreement_.emplace(error);
    }
    fail(error);
  }

  /// After a disagreement, all ranks fail with the same message.
  [[noreturn]] void fail_together(const Error& error) {
    std::unique_lock working(rendezvous_->working_);
    const std::optional<Error> found = rendezvous_->disagreement_;
    working.unlock();
    fail(found ? found->on(rank()) : error);
  }

  std::shared_ptr<Rendezvous> rendezvous_;
  std::array<std::uint64_t, ring> records_{};  // of the flight recorder
  std::mutex* turns_ = nullptr;
};

/// Does a call's work on host memory; `call` may be any rank's.
template <class C>
void work_for_all(const C& call, std::span<const CallArguments> ranks) {
  using T = typename C::element;
  if constexpr (C::kind == CollectiveKind::all_reduce) {
    std::vector<T*> targets(ranks.size());
    for (std::size_t w = 0; w < ranks.size(); ++w) targets[w] = static_cast<T*>(ranks[w].out);
    push<dynamic, T>(targets, 0, call.count, call.op);
  } else {
    const auto source = [&](std::size_t w) { return static_cast<const T*>(ranks[w].in); };
    const std::size_t length = call.count * (C::collects_pieces ? ranks.size() : 1);
    for (std::size_t w = 0; w < ranks.size(); ++w) {
      T* const out = static_cast<T*>(ranks[w].out);
      if (out == nullptr) continue;
      take_from_all<dynamic>(call.on({}, {out, length}, call.count), Rank{w}, ranks.size(), source,
                             call.count, 0, call.count);
    }
  }
}

}  // namespace lockstep::detail::threads

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The calls of ranks that are threads of one process: a rank announces them, the last
/// one to come does the work of all, and each notices who is missing or disagrees.

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/call/peers.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/combine.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail::threads {

/// How many calls may be under way at once.
inline constexpr std::size_t ring = 32;

/// The memory that a rank brings to a call: pointers, because ranks are threads of one process.
struct Offer {
  const void* in = nullptr;
  void* out = nullptr;
  void* event = nullptr;  // the point in the rank's stream after which its memory may be used
  bool on_host = false;   // its memory is the host's
};

/// The state that all ranks share. Every rank announces its calls in the same order; the last to
/// announce one does its work, for all ranks. A call costs one wait; an asynchronous one costs none
/// until its result is needed.
///
/// Used through `Participant`, one for each rank.
class Meeting {
 public:
  explicit Meeting(WorldSize world) : ranks_(world.value()), boxes_(world.value() * world.value()) {
    for (Slot& slot : slots_) {
      slot.calls.resize(world.value());
      slot.offers.resize(world.value());
    }
  }

  std::size_t world() const { return ranks_.size(); }

  /// Forgets all calls, messages and faults. No rank may be in a call meanwhile.
  void restore() {
    for (Box& box : boxes_) box.sent.value = box.taken.value = 0;
    for (RankState& rank : ranks_) rank.arrived.value = rank.failed = rank.has_reason = 0;
    for (Slot& slot : slots_) slot.arrived = 0;
    done_.value = 0;
    disagrees_ = false;
  }

 private:
  friend class Participant;

  /// A call under way.
  struct alignas(line_pair) Slot {
    std::atomic<std::size_t> arrived{0};
    std::vector<Call> calls;
    std::vector<Offer> offers;
  };

  /// One for every pair of ranks. It holds one message: the sender waits until it was taken.
  struct Box {
    Counter sent{};
    Counter taken{};
    Call call;
    Offer offer;
  };
  Box& box(Rank from, Rank to) { return boxes_[from.value() * world() + to.value()]; }

  std::vector<RankState> ranks_;
  std::vector<Box> boxes_;
  std::array<Slot, ring> slots_;
  Counter done_{};  // calls whose work was done
  /// Held by the rank that works for all, and by a rank that gives up. After that no rank uses the
  /// memory of the rank that gave up.
  std::mutex working_;
  std::atomic<bool> disagrees_{false};
  std::optional<Error> disagreement_;
};

using Milliseconds = std::chrono::milliseconds;

/// Used by the rank's own thread only.
class Participant : public SharedPeers {
 public:
  Participant(std::shared_ptr<Meeting> meeting, Rank rank, Milliseconds timeout)
      : SharedPeers(rank, WorldSize{meeting->world()}, meeting->ranks_.data(), sizeof(RankState),
                    timeout, nullptr, &meeting->working_, &meeting->done_),
        meeting_(std::move(meeting)) {
    if (own().process.exchange(static_cast<std::uint32_t>(::getpid())) != 0) {
      throw Error("join", "another thread has joined as " + rank_text(rank),
                  "give every thread its own rank", rank);
    }
  }
  Participant(const Participant&) = delete;
  Participant& operator=(const Participant&) = delete;

  ~Participant() { leave(); }

  /// During a capture ranks take turns: each holds `mutex` except while it waits for others.
  void take_turns(std::mutex* mutex) { turns_ = mutex; }

  /// Announces a call. `bring(ticket)` gives this rank's offer once there is room for it. The rank
  /// that comes last compares the calls and runs `work(offers, ticket)`. Returns the call's number.
  template <class Bring, class Work>
  std::uint64_t announce(const Call& call, const Bring& bring, const Work& work) {
    raise_fault();
    const std::uint64_t ticket = announced();
    if (ticket >= ring) wait(ticket - ring, call);
    Meeting::Slot& slot = meeting_->slots_[ticket % ring];
    slot.calls[rank().value()] = call;
    slot.offers[rank().value()] = bring(ticket);
    own().arrived.value.store(ticket + 1, std::memory_order_release);
    if (slot.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == world()) {
      slot.arrived.store(0, std::memory_order_relaxed);
      compare(slot, ticket);
      work_on(
          call, [](std::size_t) { return true; }, [&] { work(std::span(slot.offers), ticket); });
      publish(meeting_->done_, ticket + 1);
    }
    return ticket;
  }

  /// Announces a call and waits until its work was done: `work(offers)`.
  template <class Work>
  void meet(const Call& call, const Offer& offer, const Work& work) {
    wait(announce(
             call, [&](std::uint64_t) { return offer; },
             [&](std::span<const Offer> offers, std::uint64_t) { work(offers); }),
         call);
  }

  std::uint64_t announced() const { return own().arrived.value.load(std::memory_order_relaxed); }
  bool is_done(std::uint64_t ticket) const { return reached(meeting_->done_, ticket + 1); }

  /// **Host** blocks until the work of a call was done.
  void wait(std::uint64_t ticket, const Call& call) {
    await(meeting_->done_, ticket + 1, call, {std::nullopt, ticket + 1});
  }

  /// Waits for a counter, looking after all ranks and the time when it takes long.
  void await(Counter& counter, std::uint64_t value, const Call& call, const Awaited& awaited) {
    if (reached(counter, value)) return;
    const TurnGivenUp given(turns_);
    SharedPeers::await(counter, value, call, awaited,
                       [&](const Error& error) { fail_together(error); });
  }

  /// Offers a message and waits until the receiver has taken it. Returns the receiver's event.
  void* send(const Call& call, const Offer& offer, Rank to) {
    Meeting::Box& box = meeting_->box(rank(), to);
    const std::uint64_t message = box.sent.value.load(std::memory_order_relaxed) + 1;
    box.call = call;
    box.offer = offer;
    publish(box.sent, message);
    await(box.taken, message, call, {to});
    return box.offer.event;
  }

  /// Waits for a message and copies it with `take(offer)`, which returns an event for the sender.
  template <class Take>
  void receive(const Call& call, bool on_host, Rank from, const Take& take) {
    Meeting::Box& box = meeting_->box(from, rank());
    const std::uint64_t message = box.taken.value.load(std::memory_order_relaxed) + 1;
    await(box.sent, message, call, {from});
    work_on(
        call, [&](std::size_t w) { return Rank{w} == from; },
        [&] {
          const bool same = box.call.carries_the_same_as(call);
          const char* const where = on_host ? " in device memory" : " in host memory";
          if (!same || box.offer.on_host != on_host)
            throw messages_differ(call, from, box.call.text() + (same ? where : ""), rank());
          box.offer.event = take(box.offer);
        });
    publish(box.taken, message);
  }

 private:
  /// Works on the memory of the ranks w with `takes_part(w)`, unless one of them has gone and its
  /// memory with it. If the work fails, all ranks fail.
  template <class TakesPart, class Work>
  void work_on(const Call& call, const TakesPart& takes_part, const Work& work) {
    std::unique_lock working(meeting_->working_);
    for (std::size_t w = 0; w < world(); ++w) {
      if (!takes_part(w) || (state(w).failed == 0 && state(w).left == 0)) continue;
      working.unlock();
      if (const auto error = check(call, {Rank{w}}, Clock::now())) fail_together(*error);
      fail(Error(call.text(), rank_text(Rank{w}) + " has given up", "look at that rank first",
                 rank())
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
      abandon(error.what());
      throw;
    }
  }

  /// Gives up this rank's turn while it lives.
  struct TurnGivenUp {
    explicit TurnGivenUp(std::mutex* turns) : turns(turns) {
      if (turns != nullptr) turns->unlock();
    }
    TurnGivenUp(const TurnGivenUp&) = delete;
    TurnGivenUp& operator=(const TurnGivenUp&) = delete;
    ~TurnGivenUp() {
      if (turns != nullptr) turns->lock();
    }
    std::mutex* turns;
  };

  /// Compares all ranks' calls, before any memory is touched.
  void compare(const Meeting::Slot& slot, std::uint64_t ticket) {
    const auto differs = [&](std::size_t w) {
      return !(slot.calls[w] == slot.calls[0]) || slot.offers[w].on_host != slot.offers[0].on_host;
    };
    std::size_t other = 1;
    while (other < world() && !differs(other)) ++other;
    if (other == world()) return;
    const bool same_call = slot.calls[other] == slot.calls[0];
    const auto text = [&](std::size_t w) {
      const char* const where = slot.offers[w].on_host ? " in host memory" : " in device memory";
      return slot.calls[w].text() + (same_call ? where : "");
    };
    const Error& error = meeting_->disagreement_.emplace(
        ranks_disagree(ticket, text(0), Rank{other}, text(other), rank()));
    meeting_->disagrees_.store(true, std::memory_order_release);
    fail(error);
  }

  /// After a disagreement, all ranks fail with the same words.
  [[noreturn]] void fail_together(const Error& error) {
    const bool disagree = meeting_->disagrees_.load(std::memory_order_acquire);
    const std::optional<Error>& found = meeting_->disagreement_;
    fail(disagree && found ? found->on(rank()) : error);
  }

  std::shared_ptr<Meeting> meeting_;
  std::mutex* turns_ = nullptr;
};

/// `call` is any rank's call; `ranks` has every rank's memory.
template <class C>
void work_for_all(const C& call, std::span<const Offer> ranks) {
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

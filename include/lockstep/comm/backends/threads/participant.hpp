// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file One rank at the meeting of a process's ranks: it announces calls, waits for the others,
/// and notices who is missing or disagrees.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/comm/call.hpp"
#include "lockstep/comm/fault/look_after.hpp"
#include "lockstep/comm/fault/sentences.hpp"
#include "lockstep/comm/waiting/counter.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail::threads {

using Milliseconds = std::chrono::milliseconds;

/// Used by the rank's own thread only.
class Participant {
 public:
  Participant(std::shared_ptr<Meeting> meeting, Rank rank, Milliseconds timeout)
      : meeting_(std::move(meeting)),
        rank_(rank.value()),
        timeout_(timeout),
        budget_(SpinBudget::for_ranks(world())) {
    if (own().has_joined.exchange(true)) {
      throw Error("join", "another thread has joined as rank " + std::to_string(rank_),
                  "give every thread its own rank", rank);
    }
  }
  Participant(const Participant&) = delete;
  Participant& operator=(const Participant&) = delete;

  /// Tells the others that this rank is gone, and whether an exception drove it out.
  ~Participant() {
    if (scope_.is_failure()) abandon(ended_by_exception);
    {
      const std::lock_guard working(meeting_->working_);
      own().has_left = true;
    }
    wake(meeting_->done_);
  }

  Rank rank() const { return Rank{rank_}; }
  std::size_t world() const { return meeting_->world(); }
  Milliseconds timeout() const { return timeout_; }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }

  /// During a capture ranks take turns: each holds `mutex` except while it waits for others.
  void take_turns(std::mutex* mutex) { turns_ = mutex; }

  bool is_broken() const { return own().fault.is_set(); }
  /// Throws the fault, if there is one.
  void raise_fault() const { own().fault.raise(); }

  /// Announces a call. `bring(ticket)` gives this rank's offer once there is room for it. The rank
  /// that comes last compares the calls and runs `work(offers, ticket)`. Returns the call's number.
  template <class Bring, class Work>
  std::uint64_t announce(const Call& call, const Bring& bring, const Work& work) {
    raise_fault();
    const std::uint64_t ticket = announced();
    if (ticket >= ring) wait(ticket - ring, call);
    Meeting::Slot& slot = meeting_->slots_[ticket % ring];
    slot.calls[rank_] = call;
    slot.offers[rank_] = bring(ticket);
    own().announced.store(ticket + 1, std::memory_order_release);
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

  std::uint64_t announced() const { return own().announced.load(std::memory_order_relaxed); }
  bool is_done(std::uint64_t ticket) const { return reached(meeting_->done_, ticket + 1); }

  /// **Host** blocks until the work of a call was done.
  void wait(std::uint64_t ticket, const Call& call) {
    await(meeting_->done_, ticket + 1, call,
          [&](std::size_t w) { return calls_made(w) <= ticket; });
  }

  /// Waits for a counter, looking after all ranks and the time when it takes long. `lacks(w)`: rank
  /// w has yet to do its part.
  template <class Lacks>
  void await(Counter& counter, std::uint64_t value, const Call& call, const Lacks& lacks) {
    if (reached(counter, value)) return;
    const TurnGivenUp given(turns_);
    const auto begin = std::chrono::steady_clock::now();
    wait_for(counter, value, budget_, [&] {
      look(call, lacks);
      if (std::chrono::steady_clock::now() - begin >= timeout_)
        fail(find_missing(*this, call, timeout_, lacks));
    });
  }

  /// Works on the memory of the ranks w with `takes_part(w)`, unless one of them has gone and its
  /// memory with it. If the work fails, all ranks fail.
  template <class TakesPart, class Work>
  void work_on(const Call& call, const TakesPart& takes_part, const Work& work) {
    std::unique_lock working(meeting_->working_);
    for (std::size_t w = 0; w < world(); ++w) {
      if (!takes_part(w) || !(state(w).fault.is_set() || state(w).has_left)) continue;
      working.unlock();
      look(call, [&](std::size_t other) { return other == w; });
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

  /// Gives up. The others learn why from their next call, or the one that they are in.
  void abandon(std::string_view reason) {
    give_up(gave_up("Backend<Shm>", std::string(reason), rank()), reason);
  }
  [[noreturn]] void fail(const Error& error) {
    give_up(error, error.text());
    throw error;
  }

  // The state of the other ranks, for one that waits. No thread dies without its process.

  bool has_joined(std::size_t w) const { return state(w).has_joined; }
  bool has_left(std::size_t w) const { return state(w).has_left && !state(w).fault.is_set(); }
  static constexpr bool has_died(std::size_t) { return false; }
  std::string words(std::size_t w) const {
    return state(w).has_words.load(std::memory_order_acquire) ? state(w).words : std::string();
  }
  std::uint64_t calls_made(std::size_t w) const {
    return state(w).announced.load(std::memory_order_acquire);
  }

 private:
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

  Meeting::RankState& state(std::size_t w) const { return meeting_->ranks_[w]; }
  Meeting::RankState& own() const { return state(rank_); }

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
    give_up_for(error);
  }

  /// Throws if waiting is in vain. All ranks name the same culprit: the rank whose words explain
  /// the fault, or the one that ended without a word.
  template <class Lacks>
  void look(const Call& call, const Lacks& lacks) {
    raise_fault();  // another thread of this rank may have given up
    if (meeting_->disagrees_.load(std::memory_order_acquire)) {
      if (const auto& disagreement = meeting_->disagreement_) give_up_for(*disagreement);
    }
    if (const auto fault = find_fault(*this, call, lacks)) give_up_for(*fault);
  }

  /// Gives up because of another rank's fault, which that rank tells the others.
  [[noreturn]] void give_up_for(const Error& error) {
    give_up(error.on(rank()), "");
    throw error.on(rank());
  }

  /// Returns when no rank works on this rank's memory or will.
  void give_up(const Error& error, std::string_view words) {
    {
      const std::lock_guard working(meeting_->working_);
      if (is_broken()) return;
      if (!words.empty()) {
        own().words = words;
        own().has_words.store(true, std::memory_order_release);
      }
      own().fault.note(error);
    }
    wake(meeting_->done_);
  }

  std::shared_ptr<Meeting> meeting_;
  std::size_t rank_;
  Milliseconds timeout_;
  SpinBudget budget_;
  std::mutex* turns_ = nullptr;
  EndOfScope scope_;
};
static_assert(ObservablePeers<Participant>);

}  // namespace lockstep::detail::threads

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file One rank's seat at the meeting of a process's ranks: announcing calls, waiting for the
/// others, noticing who is missing or disagrees.

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

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/waiting/counter.hpp"
#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::threads {

using Milliseconds = std::chrono::milliseconds;

/// Used by the rank's own thread only.
class Seat {
 public:
  Seat(std::shared_ptr<Meeting> meeting, Rank rank, Milliseconds timeout)
      : meeting_(std::move(meeting)),
        rank_(rank.value()),
        timeout_(timeout),
        patience_(shm::Patience::for_ranks(world())) {
    if (own().is_seated.exchange(true)) {
      throw Error("join", "another thread has joined as rank " + std::to_string(rank_),
                  "give every thread its own rank", rank);
    }
  }

  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;

  /// Tells the others that this rank is gone, and whether an exception drove it out.
  ~Seat() {
    if (std::uncaught_exceptions() > exceptions_) abandon("it ended with an exception");
    {
      const std::lock_guard working(meeting_->working_);
      own().has_left = true;
    }
    shm::wake(meeting_->done_);
  }

  Rank rank() const { return Rank{rank_}; }
  std::size_t world() const { return meeting_->world(); }
  Milliseconds timeout() const { return timeout_; }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }

  /// While this rank waits for others, they may have its turn, which it holds at every call. No
  /// turns are taken where there is no mutex.
  void take_turns(std::mutex* turns) { turns_ = turns; }

  bool is_broken() const { return own().is_broken; }

  /// Throws where an earlier call has failed.
  void require_whole(const std::string& operation) const {
    if (!is_broken()) return;
    throw Error(operation, "this communicator failed before", "start the job again", rank());
  }

  /// Announces a call. `bring(ticket)` gives this rank's offer once there is room for it. Whoever
  /// comes last compares the calls and runs `work(offers, ticket)`. Returns the call's number.
  template <class Bring, class Work>
  std::uint64_t announce(const Call& call, const Bring& bring, const Work& work) {
    if (is_broken()) require_whole(call.text());
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
      shm::publish(meeting_->done_, ticket + 1);
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
  bool is_done(std::uint64_t ticket) const { return shm::reached(meeting_->done_, ticket + 1); }

  /// **Host** blocks until the work of a call was done.
  void wait(std::uint64_t ticket, const Call& call) {
    await(meeting_->done_, ticket + 1, call, [&](std::size_t w) {
      return state(w).announced.load(std::memory_order_acquire) <= ticket;
    });
  }

  /// Waits for a counter, looking after all ranks and the time when it takes long. `lacks(w)`: rank
  /// w has yet to do its part.
  template <class Lacks>
  void await(shm::Counter& counter, std::uint64_t value, const Call& call, const Lacks& lacks) {
    if (shm::reached(counter, value)) return;
    const Pass pass(turns_);
    const auto begin = Clock::now();
    shm::wait_for(counter, value, patience_, [&] {
      look(call, lacks);
      if (Clock::now() - begin < timeout_) return;
      fail(Error(call.text(),
                 "waited " + std::to_string(timeout_.count()) + " ms for " + missing(lacks),
                 "see whether it hangs, or raise the time limit", rank()));
    });
  }

  /// Works on what the ranks have brought of which `takes_part(w)`, unless one of them has gone,
  /// and its memory with it. If the work fails, so do all ranks.
  template <class TakesPart, class Work>
  void work_on(const Call& call, const TakesPart& takes_part, const Work& work) {
    std::unique_lock working(meeting_->working_);
    for (std::size_t w = 0; w < world(); ++w) {
      if (!takes_part(w) || !(state(w).is_broken || state(w).has_left)) continue;
      working.unlock();
      look(call, [&](std::size_t other) { return other == w; });
      fail(Error(call.text(), "rank " + std::to_string(w) + " has given up",
                 "look at that rank first", rank())
               .as_consequence());
    }
    try {
      work();
    } catch (const std::exception& error) {
      working.unlock();
      abandon(error.what());
      throw;
    }
  }

  /// Gives up. The others learn why from their next call, or the one that they are in.
  void abandon(std::string_view reason) {
    if (own().is_broken) return;
    own().words = reason;
    own().has_words.store(true, std::memory_order_release);
    give_up();
  }

  [[noreturn]] void fail(const Error& error) {
    abandon(error.text());
    throw error;
  }

 private:
  using Clock = std::chrono::steady_clock;
  using RankState = Meeting::RankState;

  /// Lets others have the turn for a while.
  struct Pass {
    explicit Pass(std::mutex* turns) : turns(turns) {
      if (turns != nullptr) turns->unlock();
    }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;
    ~Pass() {
      if (turns != nullptr) turns->lock();
    }
    std::mutex* turns;
  };

  RankState& state(std::size_t w) const { return meeting_->ranks_[w]; }
  RankState& own() const { return state(rank_); }

  /// Compares everybody's call. Nobody's memory has been touched yet.
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
      return "rank " + std::to_string(w) + " called " + slot.calls[w].text() +
             (same_call ? where : "");
    };
    const Error& error = meeting_->disagreement_.emplace(
        "call " + std::to_string(ticket), "ranks disagree: " + text(0) + " and " + text(other),
        "let every rank make the same calls in the same order");
    meeting_->disagrees_.store(true, std::memory_order_release);
    give_up_for(error);
  }

  /// Throws if there is nothing to wait for any more. Everybody names the same culprit: the rank
  /// that knows why, or the one that went without a word.
  template <class Lacks>
  void look(const Call& call, const Lacks& lacks) {
    if (meeting_->disagrees_.load(std::memory_order_acquire)) {
      if (const auto& disagreement = meeting_->disagreement_) give_up_for(*disagreement);
    }
    for (std::size_t w = 0; w < world(); ++w) {
      if (w == rank_ || !state(w).has_words.load(std::memory_order_acquire)) continue;
      give_up_for(Error(call.text(), "rank " + std::to_string(w) + " failed: " + state(w).words,
                        "look at that rank first")
                      .as_consequence());
    }
    for (std::size_t w = 0; w < world(); ++w) {
      if (w == rank_ || !state(w).has_left || state(w).is_broken || !lacks(w)) continue;
      give_up_for(Error(call.text(),
                        "rank " + std::to_string(w) + " closed its communicator without this call",
                        "let every rank make the same calls"));
    }
  }

  /// Every rank that has yet to do its part, and how far it is.
  template <class Lacks>
  std::string missing(const Lacks& lacks) const {
    std::string names;
    for (std::size_t w = 0; w < world(); ++w) {
      if (w == rank_ || !lacks(w)) continue;
      names += (names.empty() ? "rank " : ", rank ") + std::to_string(w);
      names += state(w).is_seated ? " (made " + std::to_string(state(w).announced) + " of " +
                                        std::to_string(announced()) + " calls)"
                                  : " (never joined)";
    }
    return names.empty() ? "the rank that came last" : names;
  }

  [[noreturn]] void give_up_for(const Error& error) {
    give_up();
    throw error.on(rank());
  }

  /// Returns once nobody works on what this rank has brought, and nobody will.
  void give_up() {
    {
      const std::lock_guard working(meeting_->working_);
      own().is_broken = true;
    }
    shm::wake(meeting_->done_);
  }

  std::shared_ptr<Meeting> meeting_;
  std::size_t rank_;
  Milliseconds timeout_;
  shm::Patience patience_;
  std::mutex* turns_ = nullptr;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace lockstep::threads

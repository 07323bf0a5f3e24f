// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The meeting point of a shared-memory communicator: a rank posts calls, waits for the
/// others, and notices who is missing or disagrees.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

#include "lockstep/comm/backends/shm/arenas.hpp"
#include "lockstep/comm/backends/shm/control.hpp"
#include "lockstep/comm/backends/shm/memory_file.hpp"
#include "lockstep/comm/call.hpp"
#include "lockstep/comm/fault/first_fault.hpp"
#include "lockstep/comm/fault/look_after.hpp"
#include "lockstep/comm/waiting/counter.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail::shm {

using Milliseconds = std::chrono::milliseconds;

/// A call that this rank has posted and whose work it has yet to do. Work is done in the order of
/// posting, so that one counter tells how far a rank is.
struct PostedCall {
  std::uint64_t ticket = 0;
  void (*finish)(PostedCall&) = nullptr;  // waits for all ranks, then works
};

/// One rank's end of the shared control blocks. Used by one thread at a time.
class Engine {
 public:
  /// Makes the memory for a world. One rank does this and tells the others the address.
  static MemoryFile make_file(WorldSize world);
  static std::string address(const MemoryFile& file);
  static MemoryFile open(const std::string& address);

  Engine(Rank rank, WorldSize world, MemoryFile file, Milliseconds timeout);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  /// Tells the others that this rank is gone, and whether an exception drove it out.
  ~Engine();

  Rank rank() const { return Rank{rank_}; }
  std::size_t world() const { return world_; }
  Milliseconds timeout() const { return timeout_; }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }

  RankBlock& block(std::size_t rank) const {
    return reinterpret_cast<RankBlock*>(blocks_.data())[rank];
  }
  RankBlock& own() const { return block(rank_); }
  Slot& slot(std::size_t rank, std::uint64_t ticket) const {
    return block(rank).slots[ticket % ring];
  }
  const Arenas& arenas() const { return arenas_; }

  /// Makes `bytes` of memory for every rank, visible to all. Ranks: all, with the same size.
  std::byte* allocate(std::size_t bytes);
  /// Makes `bytes` of memory that all ranks have in common. Ranks: all, with the same size.
  std::byte* allocate_shared(std::size_t bytes);

  // Calls

  /// Announces a call; its data must be ready. `fill` writes into the slot before the others see
  /// it.
  template <class Fill>
  std::uint64_t post(const Call& call, std::uint64_t offset, const Fill& fill) {
    fault_.raise();
    const std::uint64_t ticket = posted_++;
    if (ticket >= ring) {  // the slot's last call must be over on all ranks, this one first
      finish_pending(ticket - ring + 1);
      for_others([&](std::size_t w) { wait(w, block(w).finished, ticket - ring + 1, call); });
    }
    Slot& slot = this->slot(rank_, ticket);
    slot.call = call;
    slot.offset = offset;
    fill(slot);
    publish(own().arrived, ticket + 1);
    return ticket;
  }

  bool all_arrived(std::uint64_t ticket) const {
    return all_others([&](std::size_t w) { return reached(block(w).arrived, ticket + 1); });
  }
  bool all_finished(std::uint64_t ticket) const {
    return all_others([&](std::size_t w) { return reached(block(w).finished, ticket + 1); });
  }
  bool all_agree(std::uint64_t ticket) const {
    const Call& mine = slot(rank_, ticket).call;
    return all_others([&](std::size_t w) { return slot(w, ticket).call == mine; });
  }

  /// Waits until every rank has posted the call, and compares. No rank has written any data yet.
  void wait_arrived(std::uint64_t ticket) {
    for_others(
        [&](std::size_t w) { wait(w, block(w).arrived, ticket + 1, slot(rank_, ticket).call); });
    if (!all_agree(ticket)) [[unlikely]]
      fail_disagreement(ticket);
  }
  void wait_finished(std::uint64_t ticket) {
    for_others(
        [&](std::size_t w) { wait(w, block(w).finished, ticket + 1, slot(rank_, ticket).call); });
  }

  /// Says that this rank has done its work on the call's memory.
  void finish(std::uint64_t ticket) {
    worked_ = ticket + 1;
    publish(own().finished, worked_);
  }

  // Order: the calls from `worked_` up to `posted_` are under way here.

  void add(PostedCall& call) { pending_[call.ticket % ring] = &call; }
  bool is_next(std::uint64_t ticket) const { return worked_ == ticket; }
  PostedCall& next() const { return *pending_[worked_ % ring]; }

  /// Does the work of everything posted before `ticket`.
  void finish_pending(std::uint64_t ticket) {
    while (worked_ < std::min(ticket, posted_)) {
      fault_.raise();  // calls of a communicator that has failed are left as they are
      finish_next();
    }
  }

  /// The one call through a pointer. It is needed where a caller cannot know the type of the next
  /// call: out of order, or in a helper thread. Waiting in order never comes here.
  [[gnu::noinline]] void finish_next() { next().finish(next()); }

  /// Does the next pending work if all ranks have posted it and agree. Never waits.
  bool work_if_ready() {
    if (is_broken() || worked_ == posted_ || !all_arrived(worked_) || !all_agree(worked_))
      return false;
    finish_next();
    return true;
  }

  /// Held by each user of the engine where a helper thread is one of them.
  std::mutex& turns() { return turns_; }

  // Faults

  /// Waits for a counter of rank w, looking after all ranks and the time when it takes long.
  void wait(std::size_t w, Counter& counter, std::uint64_t value, const Call& call) {
    if (reached(counter, value)) [[likely]]
      return;
    const auto begin = std::chrono::steady_clock::now();
    wait_for(counter, value, budget_, [&] { look(w, call, begin); });
  }

  [[noreturn]] void fail(const Error& error);
  /// Gives up. The others learn why from their next call, or the one that they are in.
  void abandon(std::string_view reason);
  bool is_broken() const { return fault_.is_set(); }
  /// Throws the fault, if there is one.
  void raise_fault() const { fault_.raise(); }

  // The state of the other ranks, for one that waits.

  bool has_joined(std::size_t w) const {
    return block(w).process.load(std::memory_order_acquire) != 0;
  }
  bool has_left(std::size_t w) const { return block(w).left.load(std::memory_order_acquire) != 0; }
  /// Has the rank's process ended? False for threads of this process.
  bool has_died(std::size_t w) const;
  std::string words(std::size_t w) const;
  std::uint64_t calls_made(std::size_t w) const {
    return w == rank_ ? posted_ : block(w).arrived.value.load(std::memory_order_acquire);
  }

 private:
  /// Adds `length` bytes to the file, because all ranks ask for `bytes` each, and maps them.
  Mapping map_more(std::size_t bytes, std::size_t length);

  template <class F>
  bool all_others(const F& holds) const {
    for (std::size_t w = 0; w < world_; ++w) {
      if (w != rank_ && !holds(w)) return false;
    }
    return true;
  }
  template <class F>
  void for_others(const F& f) const {
    for (std::size_t i = 1; i < world_; ++i) f((rank_ + i) % world_);
  }

  [[noreturn]] void fail_disagreement(std::uint64_t ticket);
  void give_up(const Error& error, std::string_view words);

  /// Throws if waiting is in vain or the time is over. `behind` is the rank that is waited for.
  void look(std::size_t behind, const Call& call, std::chrono::steady_clock::time_point begin);

  std::size_t rank_;
  std::size_t world_;
  Milliseconds timeout_;
  SpinBudget budget_;
  MemoryFile file_;
  Mapping blocks_;
  std::size_t file_bytes_;
  Arenas arenas_;
  std::uint64_t posted_ = 0;
  std::uint64_t worked_ = 0;
  std::array<PostedCall*, ring> pending_{};
  std::mutex turns_;
  FirstFault fault_;
  EndOfScope scope_;
};
static_assert(ObservablePeers<Engine>);

}  // namespace lockstep::detail::shm

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/comm/backends/shm/engine.ipp"
#endif

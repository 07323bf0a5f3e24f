// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The calls of a shared-memory communicator: a rank posts them, waits for the others,
/// does its work, and notices who is missing or disagrees.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>

#include "lockstep/comm/backends/shm/memory.hpp"
#include "lockstep/comm/call.hpp"
#include "lockstep/comm/call/counter.hpp"
#include "lockstep/comm/call/peers.hpp"
#include "lockstep/comm/call/pending_calls.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/thread.hpp"

namespace lockstep::detail::shm {

using Milliseconds = std::chrono::milliseconds;

/// A call that this rank has posted and whose work it has yet to do. Work is done in the order of
/// posting, so that one counter tells how far a rank is.
struct PostedCall {
  std::uint64_t ticket = 0;
  void (*finish)(PostedCall&) = nullptr;  // waits for all ranks, then works
};

/// One rank's end of the shared control blocks. Used by one thread at a time.
class Engine : public SharedPeers {
 public:
  /// Makes the memory for a world. One rank does this and tells the others the address.
  static MemoryFile make_file(WorldSize world);
  static std::string address(const MemoryFile& file);
  static MemoryFile open(const std::string& address);

  Engine(Rank rank, WorldSize world, MemoryFile file, Milliseconds timeout);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() { leave(); }

  RankBlock& block(std::size_t rank) const {
    return reinterpret_cast<RankBlock*>(blocks_.data())[rank];
  }
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
    raise_fault();
    const std::uint64_t ticket = posted_++;
    if (ticket >= ring) {  // the slot's last call must be over on all ranks, this one first
      finish_pending(ticket - ring + 1);
      for_others([&](std::size_t w) { wait(w, block(w).finished, ticket - ring + 1, call); });
    }
    Slot& slot = this->slot(me(), ticket);
    slot.call = call;
    slot.offset = offset;
    fill(slot);
    publish(own().arrived, ticket + 1);
    return ticket;
  }

  bool all_arrived(std::uint64_t ticket) const {
    return all_others([&](std::size_t w) { return reached(block(w).state.arrived, ticket + 1); });
  }
  bool all_finished(std::uint64_t ticket) const {
    return all_others([&](std::size_t w) { return reached(block(w).finished, ticket + 1); });
  }
  bool all_agree(std::uint64_t ticket) const {
    const Call& mine = slot(me(), ticket).call;
    return all_others([&](std::size_t w) { return slot(w, ticket).call == mine; });
  }

  /// Waits until every rank has posted the call, and compares. No rank has written any data yet.
  void wait_arrived(std::uint64_t ticket) {
    for_others([&](std::size_t w) {
      wait(w, block(w).state.arrived, ticket + 1, slot(me(), ticket).call);
    });
    if (!all_agree(ticket)) [[unlikely]]
      fail_disagreement(ticket);
  }
  void wait_finished(std::uint64_t ticket) {
    for_others(
        [&](std::size_t w) { wait(w, block(w).finished, ticket + 1, slot(me(), ticket).call); });
  }

  /// Says that this rank has done its work on the call's memory.
  void finish(std::uint64_t ticket) {
    worked_ = ticket + 1;
    publish(block(me()).finished, worked_);
  }

  // Order: the calls from `worked_` up to `posted_` are under way here.

  void add(PostedCall& call) { pending_[call.ticket % ring] = &call; }
  bool is_next(std::uint64_t ticket) const { return worked_ == ticket; }
  PostedCall& next() const { return *pending_[worked_ % ring]; }

  /// Does the work of everything posted before `ticket`.
  void finish_pending(std::uint64_t ticket) {
    while (worked_ < std::min(ticket, posted_)) {
      raise_fault();  // calls of a communicator that has failed are left as they are
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

  /// Waits for a counter of rank w.
  void wait(std::size_t w, Counter& counter, std::uint64_t value, const Call& call) {
    if (reached(counter, value)) [[likely]]
      return;
    await(counter, value, call, {Rank{w}}, [&](const Error& error) { fail(error); });
  }

 private:
  /// The file stays where it is, and is moved from there only now.
  Engine(Rank rank, WorldSize world, Mapping blocks, MemoryFile&& file, Milliseconds timeout);

  std::size_t me() const { return rank().value(); }

  /// Adds `length` bytes to the file, because all ranks ask for `bytes` each, and maps them.
  Mapping map_more(std::size_t bytes, std::size_t length);

  template <class F>
  bool all_others(const F& holds) const {
    for (std::size_t w = 0; w < world(); ++w) {
      if (w != me() && !holds(w)) return false;
    }
    return true;
  }
  template <class F>
  void for_others(const F& f) const {
    for (std::size_t i = 1; i < world(); ++i) f((me() + i) % world());
  }

  [[noreturn]] void fail_disagreement(std::uint64_t ticket);
  MemoryFile file_;
  Mapping blocks_;
  std::size_t file_bytes_;
  Arenas arenas_;
  std::uint64_t posted_ = 0;
  std::uint64_t worked_ = 0;
  std::array<PostedCall*, ring> pending_{};
  std::mutex turns_;
};

/// The right to use an engine: a lock where there is a helper, nothing where there is none.
template <bool Helped>
struct EngineLock {
  explicit EngineLock(Engine&) {}
};
template <>
struct EngineLock<true> {
  explicit EngineLock(Engine& engine) : lock(engine.turns()) {}
  std::lock_guard<std::mutex> lock;
};

/// Does the work of pending calls as soon as all ranks have posted them. It never waits while it
/// holds the engine, and leaves errors to the rank, which finds them when it waits.
class Helper {
 public:
  explicit Helper(Engine& engine)
      : thread_(
            ThreadName{"lockstep helper", "the helper thread of Progress<HelperThread>"},
            [&engine, this] { run(engine); },
            [&engine](const std::exception_ptr&) {
              engine.abandon("its helper thread ended with an exception");
            }) {}
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;
  ~Helper() { stopping_.store(true); }

 private:
  void run(Engine& engine) const {
    while (!stopping_.load()) {
      bool worked = false;
      {
        const EngineLock<true> lock(engine);
        worked = engine.work_if_ready();
      }
      if (!worked) sleep_for(std::chrono::microseconds(50));
    }
  }

  std::atomic<bool> stopping_ = false;
  Thread thread_;  // is joined before the flag ends
};

/// `Execute` is this rank's share of the work, called once with the call's ticket when all ranks
/// have posted. It is a type of its own, so that waiting for the call in order is a direct call.
template <class Execute, bool Helped>
class Pending : PostedCall {
 public:
  /// **Ranks** all. **Host** returns at once. `others_read`: this rank's memory is in use until all
  /// ranks are done.
  template <class Fill>
  Pending(Engine& engine, const Call& call, std::uint64_t offset, const Fill& fill,
          bool others_read, Execute execute)
      : engine_(engine), others_read_(others_read), execute_(execute) {
    const EngineLock<Helped> lock(engine);
    ticket = engine.post(call, offset, fill);
    finish = [](PostedCall& posted) { static_cast<Pending&>(posted).finish_work(); };
    engine.add(*this);
  }
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  bool test() {
    const EngineLock<Helped> lock(engine_);
    engine_.raise_fault();
    if (!worked_) {
      while (!engine_.is_next(ticket)) {
        if (!engine_.all_arrived(engine_.next().ticket)) return false;
        engine_.finish_next();
      }
      if (!engine_.all_arrived(ticket)) return false;
      finish_work();
    }
    done_ = done_ || !others_read_ || engine_.all_finished(ticket);
    return done_;
  }

  void wait() {
    const EngineLock<Helped> lock(engine_);
    if (done_) return;
    engine_.raise_fault();
    if (!worked_) {
      engine_.finish_pending(ticket);
      finish_work();
    }
    if (done_) return;
    done_ = true;
    engine_.wait_finished(ticket);
  }

  /// The call's memory may be freed now, so this rank gives the communicator up.
  void leave() {
    const EngineLock<Helped> lock(engine_);
    if (!done_) engine_.abandon(ended_by_exception);
  }

 private:
  void finish_work() {
    worked_ = done_ = true;  // set first: a call that fails is over
    engine_.wait_arrived(ticket);
    execute_(ticket);
    engine_.finish(ticket);
    done_ = !others_read_;
  }

  Engine& engine_;
  bool others_read_;
  Execute execute_;
  bool worked_ = false;
  bool done_ = false;
};

}  // namespace lockstep::detail::shm

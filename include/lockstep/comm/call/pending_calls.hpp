// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A communicator's calls in flight and its fault, as its threads share them. The first fault
/// is final: every call throws it from then on.

#include <atomic>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <optional>
#include <utility>

#include "lockstep/comm/collective.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/worker.hpp"

namespace lockstep::detail {

/// The first fault. Any thread may note one and ask for it.
class FirstFault {
 public:
  bool is_set() const { return is_set_.load(std::memory_order_acquire); }

  /// Keeps the fault if it is the first, and says whether it was.
  bool note(const Error& error) {
    const std::lock_guard lock(mutex_);
    if (error_) return false;
    error_.emplace(error);
    is_set_.store(true, std::memory_order_release);
    return true;
  }

  /// Throws the fault if there is one.
  void raise() const {
    if (is_set()) [[unlikely]]
      raise_now();
  }

 private:
  [[noreturn, gnu::cold]] void raise_now() const {
    const std::lock_guard lock(mutex_);
    if (error_) throw Error(*error_);
    std::terminate();  // it is called only where a fault is set
  }

  std::atomic<bool> is_set_ = false;
  mutable std::mutex mutex_;
  std::optional<Error> error_;
};

/// A call in flight on this rank.
struct PendingCall {
  Call call;
  std::chrono::steady_clock::time_point since;
  std::optional<Rank> peer{};  // of a message; a collective is with all
  bool agreed = false;         // all ranks are in this collective
};

/// The calls in flight of a communicator that a watchdog looks after, and the condition on which
/// the threads that make them and the watchdog's wait for each other.
class PendingCalls {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using Entry = std::list<PendingCall>::iterator;

  Entry begin(const Call& call, std::optional<Rank> peer) {
    const std::lock_guard lock(mutex_);
    return calls_.insert(calls_.end(), PendingCall{call, std::chrono::steady_clock::now(), peer});
  }
  void agree(Entry entry) {
    const std::lock_guard lock(mutex_);
    entry->agreed = true;
  }
  void end(Entry entry) {
    const std::lock_guard lock(mutex_);
    calls_.erase(entry);
  }
  std::optional<PendingCall> oldest() const {
    const std::lock_guard lock(mutex_);
    return calls_.empty() ? std::nullopt : std::optional(calls_.front());
  }

  /// For state of the backend that both threads use.
  std::mutex& mutex() const { return mutex_; }
  /// Changes such state by `f()`, for which another thread may `wait`.
  template <class F>
  void change(const F& f) {
    const std::lock_guard lock(mutex_);
    f();
    changed_.notify_all();
  }
  /// **Host** blocks until `done()`. False if that takes longer than the limit.
  template <class F>
  bool wait(Milliseconds limit, const F& done) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, done);
  }

  // Faults

  bool is_broken() const { return fault_.is_set(); }
  void raise_fault() const { fault_.raise(); }
  /// Notes a fault. Returns whether it was the first.
  bool note(const Error& error) {
    const bool is_first = fault_.note(error);
    change([] {});
    return is_first;
  }
  /// The library has failed. Throws the error that the watchdog makes of it within the limit.
  [[noreturn]] void raise_explained(Milliseconds limit, const Error& unexplained) {
    change([&] { complains_ = true; });
    wait(limit, [&] { return is_broken(); });
    fault_.note(unexplained);
    fault_.raise();
    std::terminate();  // there is a fault
  }
  bool complains() const {
    const std::lock_guard lock(mutex_);
    return complains_;
  }

  // The watchdog

  /// Waits for a tick, or less when there is a failure to explain. False at once when there is a
  /// fault or the communicator ends.
  bool watch_goes_on(Milliseconds tick) const {
    wait(tick, [&] { return stopping_ || complains_ || is_broken(); });
    const std::lock_guard lock(mutex_);
    return !stopping_ && !is_broken();
  }
  void watch_has_ended() {
    change([&] { watch_ended_ = true; });
  }
  /// Tells the watchdog to end. Returns whether it has done so within the limit.
  bool stop_watch(Milliseconds limit) {
    change([&] { stopping_ = true; });
    return wait(limit, [&] { return watch_ended_; });
  }

 private:
  FirstFault fault_;
  mutable std::mutex mutex_;  // for what follows
  mutable std::condition_variable changed_;
  std::list<PendingCall> calls_;
  bool complains_ = false;  // the library has failed, and nobody has said why
  bool stopping_ = false;
  bool watch_ended_ = false;
};

/// The thread that makes the asynchronous calls of a communicator whose calls block, in the order
/// of posting. Calls of a broken communicator fail at once, so that the end of the queue does not
/// hang.
inline constexpr ThreadName call_thread{"lockstep calls",
                                        "the thread that makes asynchronous calls"};

/// The `Pending` of a `Work` whose call, `f()`, a queue makes. `Owner` has the queue, and its
/// `give_up()` ends the calls under way.
template <class Owner, class F>
class PendingInQueue : Task {
 public:
  PendingInQueue(Owner& owner, F f) : owner_(owner), f_(std::move(f)) {
    run = [](Task& task) { static_cast<PendingInQueue&>(task).f_(); };
    owner.queue().post(*this);
  }
  PendingInQueue(const PendingInQueue&) = delete;
  PendingInQueue& operator=(const PendingInQueue&) = delete;
  ~PendingInQueue() { owner_.queue().settle(*this); }

  bool test() { return owner_.queue().test(*this); }
  void wait() { owner_.queue().wait(*this); }
  void leave() {
    owner_.give_up();
    owner_.queue().settle(*this);
  }

 private:
  Owner& owner_;
  F f_;
};

}  // namespace lockstep::detail

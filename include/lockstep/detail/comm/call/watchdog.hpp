// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Calls in flight, the first fault, and the watchdog thread for timeouts and failures.

#include <list>

#include "lockstep/detail/comm/call/peers.hpp"
#include "lockstep/detail/core/thread.hpp"

namespace lockstep::detail {

/// The first fault, which is final: every later call throws it. Thread-safe.
class FirstFault {
 public:
  bool is_set() const { return is_set_.load(std::memory_order_acquire); }

  /// Stores the fault if it is the first, and returns whether it was.
  bool note(const Error& error) {
    const std::lock_guard lock(mutex_);
    if (error_) return false;
    error_.emplace(error);
    is_set_.store(true, std::memory_order_release);
    return true;
  }

  void raise() const {
    if (is_set()) [[unlikely]]
      raise_now();
  }

 private:
  [[noreturn, gnu::cold]] void raise_now() const {
    const std::lock_guard lock(mutex_);
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): the caller has seen that there is one
    throw Error(error_.value());
  }

  std::atomic<bool> is_set_ = false;
  mutable std::mutex mutex_;
  std::optional<Error> error_;
};

struct PendingCall {
  Call call;
  std::chrono::steady_clock::time_point since;
  std::optional<Rank> peer{};  // of a message; a collective is with all
  std::uint64_t number = 0;    // among collectives, or among messages to or from that rank
  bool agreed = false;         // all ranks are in this collective
  std::uint64_t record = 0;    // of the flight recorder
};

/// The calls in flight, and the condition variable by which their threads and the watchdog wait.
class PendingCalls {
 public:
  using Entry = std::list<PendingCall>::iterator;

  PendingCalls(std::string_view backend, GroupMember member)
      : recorder_(backend, std::move(member)) {}

  Entry begin(const Call& call, std::optional<Rank> peer, std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    const std::uint64_t record = recorder_.schedule(call);
    return calls_.insert(calls_.end(), PendingCall{call, now, peer, number, false, record});
  }
  void agree(Entry entry) {
    const std::lock_guard lock(mutex_);
    entry->agreed = true;
    recorder_.start(entry->record);
  }
  /// A call that a fault has ended is not complete.
  void end(Entry entry) {
    const std::lock_guard lock(mutex_);
    if (!is_broken()) recorder_.complete(entry->record);
    calls_.erase(entry);
  }
  /// Its calls are recorded with `mutex` held.
  FlightRecorder& recorder() { return recorder_; }
  std::optional<PendingCall> oldest() const {
    const std::lock_guard lock(mutex_);
    return calls_.empty() ? std::nullopt : std::optional(calls_.front());
  }

  /// Also guards the backend's state that both threads use.
  std::mutex& mutex() const { return mutex_; }
  /// Calls `f()`, which changes such state, and wakes the threads in `wait`.
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

  bool is_broken() const { return fault_.is_set(); }
  void raise_fault() const { fault_.raise(); }
  bool note(const Error& error) {
    const bool is_first = fault_.note(error);
    change([] {});
    if (is_first) dump_after_fault(recorder_.member().job_rank);
    return is_first;
  }
  /// Throws the watchdog's explanation of the library's failure or, after the limit, `unexplained`.
  [[noreturn]] void raise_explained(Milliseconds limit, const Error& unexplained) {
    change([&] { complains_ = true; });
    wait(limit, [&] { return is_broken(); });
    note(unexplained);
    fault_.raise();
    std::terminate();  // there is a fault
  }
  bool complains() const {
    const std::lock_guard lock(mutex_);
    return complains_;
  }

  /// Waits for a tick, or less for a failure to explain. False after a fault or `stop_watch`.
  bool watch_goes_on(Milliseconds tick) const {
    wait(tick, [&] { return stopping_ || complains_ || is_broken(); });
    const std::lock_guard lock(mutex_);
    return !stopping_ && !is_broken();
  }
  void watch_has_ended() {
    change([&] { watch_ended_ = true; });
  }
  /// Stops the watchdog. Returns whether it has ended within the limit.
  bool stop_watch(Milliseconds limit) {
    change([&] { stopping_ = true; });
    return wait(limit, [&] { return watch_ended_; });
  }

 private:
  FirstFault fault_;
  FlightRecorder recorder_;
  mutable std::mutex mutex_;  // for what follows
  mutable std::condition_variable changed_;
  std::list<PendingCall> calls_;
  bool complains_ = false;  // the library has failed, for an unknown reason
  bool stopping_ = false;
  bool watch_ended_ = false;
};

/// The thread of asynchronous calls. After a fault they fail at once: the queue's end never hangs.
inline constexpr ThreadName call_thread{"lockstep calls",
                                        "the thread that makes asynchronous calls"};

/// The `Pending` of a call, `f()`, in the queue of `Owner`, whose `give_up()` ends calls in flight.
template <class Owner, class F>
class PendingInQueue : Task {
 public:
  PendingInQueue(Owner& owner, F f) : owner_(owner), f_(std::move(f)) {
    run = [](Task& task) { static_cast<PendingInQueue&>(task).f_(); };
    owner.queue().post(*this);
  }
  PendingInQueue(const PendingInQueue&) = delete;
  PendingInQueue& operator=(const PendingInQueue&) = delete;
  ~PendingInQueue() { owner_.queue().wait_quietly(*this); }

  bool test() { return owner_.queue().test(*this); }
  void wait() { owner_.queue().wait(*this); }
  void leave() {
    owner_.give_up();
    owner_.queue().wait_quietly(*this);
  }

 private:
  Owner& owner_;
  F f_;
};

/// A communicator's engine and its watchdog thread, which uses a probe: the engine, or an object of
/// that thread. `poll()` checks library and ranks, `time_over(call)` is the error of a timeout.
///
/// The destructor closes the communicator, or aborts it while an exception unwinds the stack. It
/// never hangs: a thread that does not return from the library is detached with all that it uses.
template <class Engine, class Probe = Engine>
class CallWatchdog {
 public:
  explicit CallWatchdog(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {
    try {
      thread_ = Thread(
          Probe::thread, [watched = engine_] { watch(*watched); },
          [watched = engine_](const std::exception_ptr& thrown) {
            watched->fail(Error(Probe::backend, error_of(thrown).problem(), "start the job again",
                                watched->rank()));
          });
    } catch (const Error& error) {  // the others have joined already, and must hear why this ends
      engine_->fail(error.on(engine_->rank()));
      throw;
    }
  }

  CallWatchdog(CallWatchdog&&) noexcept = default;
  CallWatchdog& operator=(CallWatchdog&&) = delete;

  ~CallWatchdog() {
    if (engine_ == nullptr) return;
    try {
      if (scope_.is_failure()) engine_->give_up();
      engine_->drain();
      if (engine_->pending().stop_watch(end_limit)) {
        thread_.join();
        engine_->close();
      }
    } catch (const Error& error) {
      engine_->fail(error);  // the library is in no state to be waited for
    }
    thread_.detach();
  }

  Engine& operator*() const { return *engine_; }
  Engine* operator->() const { return engine_.get(); }

 private:
  /// The time limit for the watchdog to end, including an abort of the library.
  static constexpr std::chrono::milliseconds end_limit{10'000};

  static void watch(Engine& engine) {
    PendingCalls& pending = engine.pending();
    try {
      std::conditional_t<std::is_same_v<Engine, Probe>, Engine&, Probe> probe(engine);
      WaitTime time;
      while (pending.watch_goes_on(Probe::tick)) {
        probe.poll();
        const auto call = engine.waiting();
        const auto now = WaitTime::Clock::now();
        if (!call) continue;
        if (call->since != time.begin()) time = WaitTime(call->since);
        if (time.until(now) >= engine.timeout() && !pending.is_broken())
          engine.fail(probe.time_over(*call));
      }
    } catch (const Error& error) {
      engine.fail(error);
    }
    if (pending.is_broken()) engine.abort();
    pending.watch_has_ended();
  }

  std::shared_ptr<Engine> engine_;
  Thread thread_;
  EndOfScope scope_;
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The thread that looks after a communicator: whether its calls end in time, and whether the
/// library or another rank has failed.

#include <exception>
#include <memory>
#include <type_traits>
#include <utility>

#include "lockstep/comm/call/peers.hpp"
#include "lockstep/comm/call/pending_calls.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/thread.hpp"

namespace lockstep::detail {

/// One rank's end of a communicator, an engine, and the thread that watches it by a probe: the
/// engine itself, or an object that is made on that thread. The probe's `poll()` looks at the
/// library and at the other ranks, and `time_over(call)` is the error of a call that has reached
/// the time limit.
///
/// The destructor closes the communicator, or gives it up while an exception unwinds the stack. It
/// never hangs: a thread that does not return from the library is detached with all that it uses.
template <class Engine, class Probe = Engine>
class CallWatchdog {
 public:
  explicit CallWatchdog(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {
    try {
      thread_ = Thread(
          Probe::thread, [watched = engine_] { watch(*watched); },
          [watched = engine_](const std::exception_ptr& thrown) {
            watched->fail(Error(Probe::backend, Failure::of(thrown).problem, "start the job again",
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
  /// How long a watchdog may take to end, and to end the library's work; nothing waits longer.
  static constexpr std::chrono::milliseconds end_limit{10'000};

  static void watch(Engine& engine) {
    PendingCalls& pending = engine.pending();
    try {
      std::conditional_t<std::is_same_v<Engine, Probe>, Engine&, Probe> probe(engine);
      while (pending.watch_goes_on(Probe::tick)) {
        probe.poll();
        const auto call = engine.waiting();
        const auto now = std::chrono::steady_clock::now();
        if (call && !pending.is_broken() && now - call->since >= engine.timeout())
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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `stop_request.hpp`.

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <string>

#include "lockstep/checkpoint/stop_request.hpp"
#include "lockstep/core/deadline.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/text.hpp"

namespace lockstep::detail {

/// One of the signals that ask, and what it did before.
struct StopSignal {
  int number;
  struct sigaction before{};
  bool is_taken = false;   // ours is its handler
  std::string too_late{};  // what is said when the time is over
};

/// What the stop requests of a process share. The handler reads what was written before it was
/// installed, and the atomics.
struct StopState {
  std::mutex mutex;
  std::size_t requests = 0;
  StopSignal signals[2] = {{SIGTERM}, {SIGUSR1}};
  std::chrono::milliseconds limit{};
  timer_t timer{};
  bool has_timer = false;
  std::atomic<pid_t> process = 0;
  std::atomic<int> asked = 0;
  std::atomic<bool> is_finished = false;
  static_assert(std::atomic<int>::is_always_lock_free);
};

LOCKSTEP_INLINE StopState& stop_state() {
  // Never destroyed: a signal may come at any time.
  static StopState& state = *new StopState;
  return state;
}

/// Lets the time limit begin (or ends it, with 0). timer_settime may be called in a handler.
LOCKSTEP_INLINE void set_stop_timer(StopState& state, std::chrono::milliseconds limit) {
  if (!state.has_timer) return;
  itimerspec time{};
  time.it_value.tv_sec = static_cast<time_t>(limit.count() / 1000);
  time.it_value.tv_nsec = static_cast<long>(limit.count() % 1000 * 1'000'000);
  ::timer_settime(state.timer, 0, &time, nullptr);
}

LOCKSTEP_INLINE void handle_stop_signal(int number, siginfo_t* info, void* context) {
  const int error = errno;
  StopState& state = stop_state();
  StopSignal& signal = state.signals[number == SIGTERM ? 0 : 1];
  if (state.process.load(std::memory_order_relaxed) != ::getpid()) {
    // A process that was forked from the job: the signal does there what it did before.
    ::sigaction(number, &signal.before, nullptr);
    ::raise(number);
  } else if (info != nullptr && info->si_code == SI_TIMER && info->si_value.sival_ptr == &state) {
    const int first = state.asked.load(std::memory_order_relaxed);
    const std::string& words = state.signals[first == SIGUSR1 ? 1 : 0].too_late;
    if (first != 0) {
      [[maybe_unused]] const ssize_t n = ::write(2, words.data(), words.size());
      ::_exit(128 + first);
    }
  } else {
    int nobody = 0;
    if (state.asked.compare_exchange_strong(nobody, number) &&
        !state.is_finished.load(std::memory_order_relaxed))
      set_stop_timer(state, state.limit);
    if ((signal.before.sa_flags & SA_SIGINFO) != 0) {
      signal.before.sa_sigaction(number, info, context);
    } else if (signal.before.sa_handler != SIG_DFL && signal.before.sa_handler != SIG_IGN) {
      signal.before.sa_handler(number);
    }
  }
  errno = error;
}

/// Installs the handlers that are not installed yet.
LOCKSTEP_INLINE void take_stop_signals(StopState& state) {
  for (StopSignal& signal : state.signals) {
    signal.too_late = text(
        {"lockstep: ", signal_name(signal.number), " asked this process to stop ",
         seconds_text(state.limit),
         " ago, and its step and the checkpoint have not come to an end; it ends now, and the ",
         "newest checkpoint is an older one: raise LOCKSTEP_GRACE_SECONDS\n"});
    if (signal.is_taken) continue;
    if (::sigaction(signal.number, nullptr, &signal.before) != 0) continue;
    const bool has_function = (signal.before.sa_flags & SA_SIGINFO) != 0;
    if (!has_function && signal.before.sa_handler == SIG_IGN) continue;
    struct sigaction ours{};
    ours.sa_sigaction = handle_stop_signal;
    ours.sa_flags = SA_SIGINFO | SA_RESTART;
    // One at a time: the second would find the first half noted.
    ::sigemptyset(&ours.sa_mask);
    for (const StopSignal& other : state.signals) ::sigaddset(&ours.sa_mask, other.number);
    signal.is_taken = ::sigaction(signal.number, &ours, nullptr) == 0;
  }
}

LOCKSTEP_INLINE void put_stop_signals_back(StopState& state) {
  // First the timer, whose signal must not meet another's handler.
  if (state.has_timer) ::timer_delete(state.timer);
  state.has_timer = false;
  for (StopSignal& signal : state.signals) {
    if (!signal.is_taken) continue;
    // Somebody else's handler that was installed since stays.
    struct sigaction now{};
    const bool is_ours = ::sigaction(signal.number, nullptr, &now) == 0 &&
                         (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == handle_stop_signal;
    if (is_ours) ::sigaction(signal.number, &signal.before, nullptr);
    signal.is_taken = false;
  }
}

LOCKSTEP_INLINE StopRequest::StopRequest() {
  const char* const seconds = std::getenv("LOCKSTEP_GRACE_SECONDS");
  const std::chrono::milliseconds limit = seconds == nullptr
                                              ? std::chrono::seconds(60)
                                              : parse_seconds("LOCKSTEP_GRACE_SECONDS", seconds);
  StopState& state = stop_state();
  const std::lock_guard lock(state.mutex);
  // A process that was forked from a job has none of the job's requests.
  if (state.process.load() != ::getpid()) state.requests = 0;
  if (state.requests++ != 0) return;
  // What was asked of a job that is over was not asked of this one.
  put_stop_signals_back(state);
  state.asked.store(0);
  state.is_finished.store(false);
  state.process.store(::getpid());
  state.limit = limit;
  // The time limit comes as one of the signals itself, so no other signal and no thread is needed.
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGTERM;
  event.sigev_value.sival_ptr = &state;
  state.has_timer = ::timer_create(CLOCK_MONOTONIC, &event, &state.timer) == 0;
  take_stop_signals(state);
  // The timer raises a signal that reaches our handler.
  if (!state.signals[0].is_taken && state.signals[1].is_taken && state.has_timer) {
    ::timer_delete(state.timer);
    event.sigev_signo = SIGUSR1;
    state.has_timer = ::timer_create(CLOCK_MONOTONIC, &event, &state.timer) == 0;
  }
}

LOCKSTEP_INLINE StopRequest::~StopRequest() {
  StopState& state = stop_state();
  const std::lock_guard lock(state.mutex);
  if (state.requests == 0) return;  // a forked child has none
  --state.requests;
  if (state.requests != 0 || state.asked.load() != 0 || state.is_finished.load()) return;
  put_stop_signals_back(state);
}

LOCKSTEP_INLINE int StopRequest::signal() const {
  return stop_state().asked.load(std::memory_order_relaxed);
}

LOCKSTEP_INLINE void StopRequest::finished() {
  StopState& state = stop_state();
  const std::lock_guard lock(state.mutex);
  state.is_finished.store(true);
  set_stop_timer(state, {});
}

LOCKSTEP_INLINE void StopRequest::forget() {
  StopState& state = stop_state();
  const std::lock_guard lock(state.mutex);
  set_stop_timer(state, {});
  state.asked.store(0);
  state.is_finished.store(false);
  if (state.requests == 0) put_stop_signals_back(state);
}

}  // namespace lockstep::detail

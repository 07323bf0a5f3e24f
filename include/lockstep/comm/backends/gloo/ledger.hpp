// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The state that the threads of a communicator share: calls under way, and the fault.

#include <chrono>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/fault/first_fault.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail::over_gloo {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

/// A call under way on this rank.
struct Ongoing {
  Call call;
  Clock::time_point since;
  std::optional<Rank> peer;  // of a message; a collective is with all
  bool agreed = false;       // all ranks are in this collective
};

class Ledger {
 public:
  // Calls

  using Entry = std::list<Ongoing>::iterator;

  Entry begin(const Call& call, std::optional<Rank> peer) {
    const std::lock_guard lock(mutex_);
    return ongoing_.insert(ongoing_.end(), Ongoing{call, Clock::now(), peer, false});
  }
  void agree(Entry entry) {
    const std::lock_guard lock(mutex_);
    entry->agreed = true;
  }
  void end(Entry entry) {
    const std::lock_guard lock(mutex_);
    ongoing_.erase(entry);
  }
  std::optional<Ongoing> oldest() const {
    const std::lock_guard lock(mutex_);
    return ongoing_.empty() ? std::nullopt : std::optional(ongoing_.front());
  }

  // Faults

  bool is_broken() const { return fault_.is_set(); }
  void note(const Error& error) {
    fault_.note(error);
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  void raise_fault() const { fault_.raise(); }

  /// Gloo has failed with these words. Throws the error that the watching thread makes of it within
  /// the limit.
  [[noreturn]] void raise_explained(const std::string& words, Milliseconds limit,
                                    const Error& unexplained) {
    std::unique_lock lock(mutex_);
    suspicion_ = words;
    changed_.notify_all();
    changed_.wait_for(lock, limit, [&] { return is_broken(); });
    fault_.note(unexplained);
    fault_.raise();
    std::terminate();  // there is a fault
  }
  std::optional<std::string> suspicion() const {
    const std::lock_guard lock(mutex_);
    return suspicion_;
  }

  // For the watching thread

  /// Waits for a tick, or less when there is a failure to explain. False when the thread is to end.
  bool watch_goes_on(Milliseconds tick) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, tick, [&] { return stopping_ || (suspicion_ && !is_broken()); });
    return !stopping_;
  }
  void stop_watch() {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }

 private:
  FirstFault fault_;
  mutable std::mutex mutex_;  // for what follows
  std::condition_variable changed_;
  std::list<Ongoing> ongoing_;
  std::optional<std::string> suspicion_;
  bool stopping_ = false;
};

}  // namespace lockstep::detail::over_gloo

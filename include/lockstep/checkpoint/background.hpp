// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The thread that writes a checkpoint while training goes on.

#include <atomic>
#include <exception>
#include <utility>

#include "lockstep/checkpoint/options.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/thread.hpp"

namespace lockstep::detail {

/// Runs one piece of work at a time beside the thread that owns this object; only that thread calls
/// its functions. A failure is kept until it is thrown or taken. One that nobody has seen at the
/// end of this object is told as a late failure (`core/scope_guard.hpp`).
class BackgroundWriter {
 public:
  explicit BackgroundWriter(Rank rank) : rank_(rank) {}
  /// **Host** blocks until the work under way is done.
  ~BackgroundWriter();
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  bool is_busy() const { return is_busy_.load(std::memory_order_acquire); }

  /// Throws the failure of work that has ended, once. A job calls it at every step.
  void rethrow() {
    if (has_failed_.load(std::memory_order_acquire)) [[unlikely]]
      throw_failure();
  }

  /// **Host** blocks until the work under way is done, and throws its failure.
  void wait();

  /// The failure of work that has ended, or null. It is not thrown any more.
  std::exception_ptr take_failure();

  /// Runs `work()` on a thread. Where other work is under way it waits for that or, with
  /// `WhenBusy::skip`, returns false. Throws the failure of earlier work, and then runs nothing.
  template <class Work>
  bool start(Work work, WhenBusy when_busy = WhenBusy::wait) {
    if (!is_free(when_busy)) return false;
    is_busy_.store(true, std::memory_order_relaxed);
    try {
      thread_ = Thread(
          ThreadName{"lockstep save", "the thread that writes a checkpoint"},
          [this, work = std::move(work)]() mutable {
            {
              Work mine = std::move(work);
              mine();
            }
            is_busy_.store(false, std::memory_order_release);
          },
          [this](std::exception_ptr thrown) { failed(std::move(thrown)); });
    } catch (...) {
      is_busy_.store(false, std::memory_order_relaxed);
      throw;
    }
    return true;
  }

 private:
  /// Can work be started now, after a wait where `when_busy` says so?
  bool is_free(WhenBusy when_busy);
  void failed(std::exception_ptr thrown);
  [[noreturn, gnu::cold]] void throw_failure();

  Rank rank_;
  std::atomic<bool> is_busy_ = false;
  std::atomic<bool> has_failed_ = false;
  std::exception_ptr failure_;  // written before has_failed_, read after it
  Thread thread_;
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/checkpoint/background.ipp"
#endif

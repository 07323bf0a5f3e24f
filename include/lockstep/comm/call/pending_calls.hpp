// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The fault of one rank's communicator. The first fault is final: every call throws it from
/// then on.

#include <atomic>
#include <exception>
#include <mutex>
#include <optional>

#include "lockstep/core/error.hpp"

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

  /// Forgets the fault, for a communicator that is repaired.
  void forget() {
    const std::lock_guard lock(mutex_);
    error_.reset();
    is_set_.store(false, std::memory_order_release);
  }

  /// Throws the fault if there is one.
  void raise() const {
    if (is_set()) [[unlikely]]
      raise_now();
  }

 private:
  [[noreturn, gnu::noinline]] void raise_now() const {
    const std::lock_guard lock(mutex_);
    if (error_) throw Error(*error_);
    std::terminate();  // it is called only where a fault is set
  }

  std::atomic<bool> is_set_ = false;
  mutable std::mutex mutex_;
  std::optional<Error> error_;
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `background.hpp`.

#include "lockstep/checkpoint/background.hpp"
#include "lockstep/core/scope_guard.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE BackgroundWriter::~BackgroundWriter() {
  thread_.join();
  if (const std::exception_ptr thrown = take_failure()) tell_late_failure({thrown, rank_});
}

LOCKSTEP_INLINE void BackgroundWriter::wait() {
  thread_.join();
  rethrow();
}

LOCKSTEP_INLINE std::exception_ptr BackgroundWriter::take_failure() {
  if (!has_failed_.load(std::memory_order_acquire)) return nullptr;
  thread_.join();  // it is on its way out, and must not hold the failure any more
  has_failed_.store(false, std::memory_order_relaxed);
  return std::exchange(failure_, nullptr);
}

LOCKSTEP_INLINE bool BackgroundWriter::is_free(WhenBusy when_busy) {
  rethrow();
  if (is_busy() && when_busy == WhenBusy::skip) return false;
  wait();
  return true;
}

LOCKSTEP_INLINE void BackgroundWriter::failed(std::exception_ptr thrown) {
  failure_ = std::move(thrown);
  has_failed_.store(true, std::memory_order_release);
  is_busy_.store(false, std::memory_order_release);
}

LOCKSTEP_INLINE void BackgroundWriter::throw_failure() { std::rethrow_exception(take_failure()); }

}  // namespace lockstep::detail

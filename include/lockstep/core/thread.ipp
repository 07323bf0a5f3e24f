// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `thread.hpp`.

#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <system_error>

#include "lockstep/core/thread.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void sleep_for(std::chrono::nanoseconds time) {
  const auto second = std::chrono::duration_cast<std::chrono::seconds>(time);
  timespec left{second.count(), (time - second).count()};
  while (::nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

LOCKSTEP_INLINE std::size_t core_count() {
  const long cores = ::sysconf(_SC_NPROCESSORS_ONLN);
  return cores > 0 ? static_cast<std::size_t>(cores) : 1;
}

LOCKSTEP_INLINE void Thread::start(const char* name, Signals signals, void* body,
                                   void* (*run)(void*)) {
  const auto create = [&] { return ::pthread_create(&thread_, nullptr, run, body); };
  const int error = signals == Signals::blocked ? without_signals(create) : create();
  if (error != 0)
    throw std::system_error(error, std::system_category(), "a thread cannot be started");
  is_running_ = true;
  ::pthread_setname_np(thread_, name);
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `thread.hpp`.

#include <glob.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "lockstep/core/error.hpp"
#include "lockstep/core/thread.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void sleep_for(std::chrono::nanoseconds time) {
  const auto second = std::chrono::duration_cast<std::chrono::seconds>(time);
  timespec left{second.count(), (time - second).count()};
  while (::nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

LOCKSTEP_INLINE std::size_t core_count() {
  std::array<cpu_set_t, 8> sets{};  // room for 8192 cores
  if (::sched_getaffinity(0, sizeof sets, sets.data()) != 0) return 1;
  return static_cast<std::size_t>(CPU_COUNT_S(sizeof sets, sets.data()));
}

LOCKSTEP_INLINE bool has_other_threads() {
  glob_t found{};
  const bool is_alone =
      ::glob("/proc/self/task/*", GLOB_NOSORT, nullptr, &found) == 0 && found.gl_pathc == 1;
  ::globfree(&found);
  return !is_alone;
}

LOCKSTEP_INLINE bool has_free_core(std::size_t busy) {
  const std::size_t mine = core_count();
  const long online = ::sysconf(_SC_NPROCESSORS_ONLN);
  const std::size_t all = online > 0 ? std::max(static_cast<std::size_t>(online), mine) : mine;
  return mine > (busy * mine + all - 1) / all;
}

LOCKSTEP_INLINE void fail_to_start(const char* words, const char* problem) {
  fail("starting a thread", {words, " cannot be started: ", problem},
       "raise the limit on processes and threads (`ulimit -u`, or the pids limit of the container "
       "or cgroup), or let fewer run here");
}

LOCKSTEP_INLINE void Thread::start(ThreadName name, Signals signals, void* body,
                                   void* (*run)(void*)) {
  const auto create = [&] { return ::pthread_create(&thread_, nullptr, run, body); };
  const int error = signals == Signals::blocked ? without_signals(create) : create();
  if (error != 0) fail_to_start(name.words, std::strerror(error));
  is_running_ = true;
  ::pthread_setname_np(thread_, name.short_name);
}

}  // namespace lockstep::detail

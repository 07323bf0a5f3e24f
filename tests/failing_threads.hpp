// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A system that runs out of threads: `pthread_create` of the whole program, which fails when
/// a test says so. Root is exempt from `ulimit -u`, so tests cannot set the limit itself.

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <climits>

/// While one lives, the process can start `more` threads, and then no other.
class ThreadLimit {
 public:
  explicit ThreadLimit(int more) {
    left().store(more);
    rejected().store(0);
  }
  ~ThreadLimit() { left().store(INT_MAX); }
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;

  /// Has a thread been asked for that could not be started?
  bool was_met() const { return rejected().load() != 0; }

  static bool admits_one() {
    if (left().load() == INT_MAX || left().fetch_sub(1) > 0) return true;
    left().store(0);
    rejected().fetch_add(1);
    return false;
  }

 private:
  static std::atomic<int>& left() {
    static std::atomic<int> left = INT_MAX;
    return left;
  }
  static std::atomic<int>& rejected() {
    static std::atomic<int> rejected = 0;
    return rejected;
  }
};

extern "C" {
using StartThread = int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);

/// A sanitizer's own, which has to know of every thread.
[[gnu::weak]] StartThread __interceptor_pthread_create;

// NOLINTNEXTLINE(misc-definitions-in-headers): one file of a program includes this
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                   void* argument) {
  static const auto system =
      &__interceptor_pthread_create != nullptr
          ? &__interceptor_pthread_create
          : reinterpret_cast<StartThread*>(::dlsym(RTLD_NEXT, "pthread_create"));
  return ThreadLimit::admits_one() ? system(thread, attributes, run, argument) : EAGAIN;
}
}

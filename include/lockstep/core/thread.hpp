// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The library's threads: no signal is delivered to them, and nothing they throw is lost.

#include <pthread.h>
#include <signal.h>

#include <exception>
#include <thread>
#include <utility>

namespace lockstep::detail {

/// `start()`, so that the threads it starts get no signals. Signals are the program's business: its
/// handlers must not run on a thread that it does not know of.
template <class Start>
auto without_signals(Start&& start) {
  struct Blocked {
    Blocked() {
      sigset_t all;
      ::sigfillset(&all);
      ::pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Blocked() { ::pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  };
  const Blocked blocked;
  return std::forward<Start>(start)();
}

/// A thread that is joined at the end of its owner.
class Thread {
 public:
  Thread() = default;

  /// Runs `work()`. What it throws goes to `report(std::exception_ptr)`, on that thread. `name` is
  /// what debuggers show: at most 15 characters.
  template <class Work, class Report>
  Thread(const char* name, Work work, Report report)
      : thread_(without_signals([&] {
          return std::thread([name, work = std::move(work), report = std::move(report)]() mutable {
            ::pthread_setname_np(::pthread_self(), name);
            try {
              work();
            } catch (...) {
              report(std::current_exception());
            }
          });
        })) {}

  Thread(Thread&&) noexcept = default;
  Thread& operator=(Thread&& other) noexcept {
    join();
    thread_ = std::move(other.thread_);
    return *this;
  }
  ~Thread() { join(); }

  bool is_running() const { return thread_.joinable(); }
  void join() {
    if (thread_.joinable()) thread_.join();
  }
  /// Leaves the thread to itself: it must own all that it uses.
  void detach() {
    if (thread_.joinable()) thread_.detach();
  }

 private:
  std::thread thread_;
};

}  // namespace lockstep::detail

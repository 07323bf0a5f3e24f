// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The library's threads: no signal is delivered to them, and nothing they throw is lost.

#include <pthread.h>
#include <signal.h>

#include <exception>

#include "lockstep/core/standard.hpp"

namespace lockstep::detail {

/// Calls `start()`, whose new threads get no signals: a program's handlers must not run on a thread
/// that it does not know of.
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

/// Lets this thread sleep.
void sleep_for(std::chrono::nanoseconds time);

/// Has this process threads beside the calling one, or can that not be found out?
bool has_other_threads();

/// On how many cores the calling thread may run, at least 1.
std::size_t core_count();

/// Is a core left where `busy` threads of this machine each have one? A thread that is bound to a
/// part of the machine has that part of the busy ones beside it.
bool has_free_core(std::size_t busy);

/// Whether a thread gets signals. Threads that run the program's own code as ranks do.
enum class Signals { blocked, delivered };

/// What a thread is called: the name that debuggers show, at most 15 characters, and the words with
/// which an error says that it cannot be started.
struct ThreadName {
  const char* short_name;
  const char* words;
};

/// Says that a thread cannot be started, because of `problem`, and what to do about that.
[[noreturn, gnu::cold]] void fail_to_start(const char* words, const char* problem);

/// A thread that is joined at the end of its owner. It is no `std::thread`, which costs the
/// compiler half a dozen classes for every function.
class Thread {
 public:
  Thread() = default;

  /// Runs `work()`. Its exception goes to `report(std::exception_ptr)`, on that thread. Throws an
  /// `Error` where the system has no thread left: whoever starts several ends those that wait.
  template <class Work, class Report>
  Thread(ThreadName name, Work work, Report report, Signals signals = Signals::blocked) {
    struct Body {
      Work work;
      Report report;
    };
    std::unique_ptr<Body> body(new Body{std::move(work), std::move(report)});
    start(name, signals, body.get(), [](void* owned) -> void* {
      const std::unique_ptr<Body> mine(static_cast<Body*>(owned));
      try {
        mine->work();
      } catch (...) {
        mine->report(std::current_exception());
      }
      return nullptr;
    });
    body.release();
  }

  Thread(Thread&& other) noexcept
      : thread_(other.thread_), is_running_(std::exchange(other.is_running_, false)) {}
  Thread& operator=(Thread&& other) noexcept {
    join();
    thread_ = other.thread_;
    is_running_ = std::exchange(other.is_running_, false);
    return *this;
  }
  ~Thread() { join(); }

  bool is_running() const { return is_running_; }
  void join() {
    if (std::exchange(is_running_, false)) ::pthread_join(thread_, nullptr);
  }
  /// Detaches the thread, which must own all that it uses.
  void detach() {
    if (std::exchange(is_running_, false)) ::pthread_detach(thread_);
  }

 private:
  void start(ThreadName name, Signals signals, void* body, void* (*run)(void*));

  pthread_t thread_{};
  bool is_running_ = false;
};

}  // namespace lockstep::detail

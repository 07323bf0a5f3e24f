// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The library's threads, which block signals and report their exceptions; a task queue with
/// one thread, and a parallel loop over tasks.

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <exception>
#include <mutex>

#include "lockstep/detail/core/utility.hpp"

namespace lockstep::detail {

/// Calls `start()` with signals blocked: threads it creates never run the program's handlers.
template <class Start>
auto without_signals(Start&& start) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  auto restore = [](const sigset_t* mask) { ::pthread_sigmask(SIG_SETMASK, mask, nullptr); };
  const std::unique_ptr<sigset_t, decltype(restore)> guard(&before, restore);
  return std::forward<Start>(start)();
}

void sleep_for(std::chrono::nanoseconds time);

/// Does this process have other threads? True where that is unknown.
bool has_other_threads();

/// The cores on which the calling thread may run, and their number, at least 1.
std::vector<std::size_t> allowed_cpus();
std::size_t core_count();

/// Is a core idle beside `busy` threads? A part of the machine has a proportional number of them.
bool has_free_core(std::size_t busy);

/// Threads that run the program's own code as ranks receive signals.
enum class Signals { blocked, delivered };

/// Whoever records what this thread does, if anybody; threads of the library inherit it from the
/// thread that starts them.
inline std::shared_ptr<void>& recorder_of_thread() {
  static thread_local std::shared_ptr<void> recorder;
  return recorder;
}

/// The name that debuggers show, at most 15 characters, and the description in error messages.
struct ThreadName {
  const char* short_name;
  const char* description;
};

/// Throws an `Error` with advice on thread limits.
[[noreturn, gnu::cold]] void fail_to_start(const char* what, const char* problem);

/// A thread that its destructor joins; it compiles faster than `std::thread`.
class Thread {
 public:
  Thread() = default;

  /// Runs `work()`, and calls `report(std::exception_ptr)` on that thread if it throws. Throws an
  /// `Error` where no thread can be created; the caller has to stop those that it started before.
  template <class Work, class Report>
  [[gnu::noinline]] Thread(ThreadName name, Work work, Report report,
                           Signals signals = Signals::blocked) {
    auto run = [work = std::move(work), report = std::move(report),
                recorder = recorder_of_thread()]() mutable {
      recorder_of_thread() = std::move(recorder);
      try {
        work();
      } catch (...) {
        report(std::current_exception());
      }
    };
    auto body = std::make_unique<decltype(run)>(std::move(run));
    start(name, signals, body.get(), [](void* owned) -> void* {
      const std::unique_ptr<decltype(run)> mine(static_cast<decltype(run)*>(owned));
      (*mine)();
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
  /// The thread must own everything that it uses.
  void detach() {
    if (std::exchange(is_running_, false)) ::pthread_detach(thread_);
  }

 private:
  void start(ThreadName name, Signals signals, void* body, void* (*run)(void*));

  pthread_t thread_{};
  bool is_running_ = false;
};

/// A task, an intrusive list node: posting allocates nothing. It must not move before it is over.
struct Task {
  /// The one call through a function pointer; it happens on the queue's thread, not on the rank's.
  void (*run)(Task&) = nullptr;
  Task* next = nullptr;
  bool is_over = false;
  std::exception_ptr error;
};

/// Runs tasks in order on one thread, which starts with the first task.
class TaskQueue {
 public:
  explicit TaskQueue(ThreadName name) : name_(name) {}
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  /// Runs all posted tasks first.
  ~TaskQueue() {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }

  /// Throws where the thread cannot be started; the task is not queued then.
  void post(Task& task);

  /// Is the task over? Rethrows its exception.
  bool test(const Task& task) const {
    const std::lock_guard lock(mutex_);
    if (task.error) std::rethrow_exception(task.error);
    return task.is_over;
  }
  /// **Host** blocks until the task is over. Rethrows its exception.
  void wait(const Task& task) const {
    wait_quietly(task);
    if (task.error) std::rethrow_exception(task.error);
  }
  /// **Host** blocks until the task is over; does not throw.
  void wait_quietly(const Task& task) const noexcept;
  /// **Host** blocks until the queue is empty; does not throw.
  void drain() const noexcept;

 private:
  void run();

  ThreadName name_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  Task* first_ = nullptr;
  Task* last_ = nullptr;
  bool stopping_ = false;
  Thread thread_;  // last: the thread uses the members above
};

/// Calls `f(i)` for every i below `tasks`, in order, on up to four threads, and as many as cores,
/// this one included. The first exception stops the work and is rethrown. **Host** blocks.
void share_work(std::size_t tasks, FunctionRef<void(std::size_t)> f);

}  // namespace lockstep::detail

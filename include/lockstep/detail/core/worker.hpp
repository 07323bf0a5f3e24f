// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Worker threads: a task queue with one thread, and a parallel loop over tasks.

#include <condition_variable>
#include <mutex>

#include "lockstep/detail/core/thread.hpp"
#include "lockstep/detail/core/utility.hpp"

namespace lockstep::detail {

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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Threads that work off tasks: a queue with a thread, which makes its tasks in order, and
/// work that a few threads share while the caller waits.

#include <condition_variable>
#include <exception>
#include <mutex>

#include "lockstep/core/thread.hpp"
#include "lockstep/core/utility.hpp"

namespace lockstep::detail {

/// A task that waits to be run, is being run, or is over. It is a link of the queue itself: posting
/// one allocates nothing, and it stays where it is until it is over.
struct Task {
  /// Runs the task. The queue's thread does not know its type: this is the one call through a
  /// pointer, and it is on that thread, not on the rank's.
  void (*run)(Task&) = nullptr;
  Task* next = nullptr;
  bool is_over = false;
  std::exception_ptr error;
};

/// Runs tasks on a thread, one after the other, in the order of posting. The thread starts with the
/// first task.
class TaskQueue {
 public:
  explicit TaskQueue(ThreadName name) : name_(name) {}
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  /// All tasks are run before it ends.
  ~TaskQueue();

  /// Throws where the thread cannot be started: the task is not run then.
  void post(Task& task);

  /// Is the task over? Throws if it failed.
  bool test(const Task& task) const;
  /// **Host** blocks until the task is over. Throws if it failed.
  void wait(const Task& task) const;
  /// **Host** blocks until the task is over, failed or not.
  void settle(const Task& task) const noexcept;
  /// **Host** blocks until no task is left, failed or not.
  void drain() const noexcept;

 private:
  void run();

  ThreadName name_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  Task* first_ = nullptr;
  Task* last_ = nullptr;
  bool stopping_ = false;
  Thread thread_;  // declared last: it uses the members above
};

/// Calls `f(task)` for every task below `tasks`, on this thread and as many others as there are
/// cores, four in all at most. Tasks are taken in order. The first exception ends the work, and is
/// thrown here. **Host** blocks until all threads are done.
void share_work(std::size_t tasks, FunctionRef<void(std::size_t)> f);

}  // namespace lockstep::detail

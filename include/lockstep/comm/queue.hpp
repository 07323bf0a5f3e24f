// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The thread that makes asynchronous calls, one after the other, in the order of posting.

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/comm/quiet_thread.hpp"

namespace lockstep {

/// A call that is to be made, is being made, or is over.
struct Job {
  std::function<void()> call;
  bool is_over = false;
  std::exception_ptr error;
};

/// For communicators whose collectives block: what is to go on while the rank computes needs a
/// thread. It starts with the first job.
class Queue {
 public:
  Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  /// All jobs are done before it ends; those of a broken communicator fail at once.
  ~Queue() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

  std::shared_ptr<Job> post(std::function<void()> call) {
    auto job = std::make_shared<Job>();
    job->call = std::move(call);
    const std::lock_guard lock(mutex_);
    jobs_.push_back(job);
    if (!thread_.joinable())
      thread_ = without_signals([&] { return std::thread([this] { run(); }); });
    changed_.notify_all();
    return job;
  }

  bool is_over(const Job& job) const {
    const std::lock_guard lock(mutex_);
    return job.is_over;
  }
  /// The same; throws if it failed.
  bool test(const Job& job) const {
    const std::lock_guard lock(mutex_);
    if (job.error) std::rethrow_exception(job.error);
    return job.is_over;
  }
  /// **Host** blocks until it is over. Throws if it failed.
  void wait(const Job& job) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return job.is_over; });
    if (job.error) std::rethrow_exception(job.error);
  }
  /// **Host** blocks until no job is left, failed or not.
  void drain() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return jobs_.empty(); });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const std::shared_ptr<Job> job = jobs_.front();
      lock.unlock();
      std::exception_ptr error;
      try {
        job->call();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      job->error = error;
      job->is_over = true;
      jobs_.pop_front();
      changed_.notify_all();
    }
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace lockstep

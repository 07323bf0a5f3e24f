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
struct QueuedCall {
  std::function<void()> f;
  bool is_over = false;
  std::exception_ptr error;
};

/// For communicators whose collectives block: what is to go on while the rank computes needs a
/// thread. It starts with the first call.
class Queue {
 public:
  Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  /// All calls are made before it ends; those of a broken communicator fail at once.
  ~Queue() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

  std::shared_ptr<QueuedCall> post(std::function<void()> f) {
    auto call = std::make_shared<QueuedCall>();
    call->f = std::move(f);
    const std::lock_guard lock(mutex_);
    calls_.push_back(call);
    if (!thread_.joinable())
      thread_ = without_signals([&] { return std::thread([this] { run(); }); });
    changed_.notify_all();
    return call;
  }

  bool is_over(const QueuedCall& call) const {
    const std::lock_guard lock(mutex_);
    return call.is_over;
  }
  /// The same; throws if it failed.
  bool test(const QueuedCall& call) const {
    const std::lock_guard lock(mutex_);
    if (call.error) std::rethrow_exception(call.error);
    return call.is_over;
  }
  /// **Host** blocks until it is over. Throws if it failed.
  void wait(const QueuedCall& call) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return call.is_over; });
    if (call.error) std::rethrow_exception(call.error);
  }
  /// **Host** blocks until no call is left, failed or not.
  void drain() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return calls_.empty(); });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopping_ || !calls_.empty(); });
      if (calls_.empty()) return;
      const std::shared_ptr<QueuedCall> call = calls_.front();
      lock.unlock();
      std::exception_ptr error;
      try {
        call->f();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      call->error = error;
      call->is_over = true;
      calls_.pop_front();
      changed_.notify_all();
    }
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<std::shared_ptr<QueuedCall>> calls_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace lockstep

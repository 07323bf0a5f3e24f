// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The thread that makes asynchronous calls, one after the other, in the order of posting.

#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

#include "lockstep/core/thread.hpp"

namespace lockstep::detail {

/// A call that waits to be made, is being made, or is over. It is a link of the queue itself:
/// posting one allocates nothing, and it stays where it is until it is over.
struct QueuedCall {
  /// Makes the call. The queue's thread does not know its type: this is the one call through a
  /// pointer, and it is on that thread, not on the rank's.
  void (*make)(QueuedCall&) = nullptr;
  QueuedCall* next = nullptr;
  bool is_over = false;
  std::exception_ptr error;
};

/// Makes calls on a thread, which starts with the first call, for communicators that block.
class Queue {
 public:
  Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  /// All calls are made before it ends; those of a broken communicator fail at once.
  ~Queue() {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }

  void post(QueuedCall& call) {
    const std::lock_guard lock(mutex_);
    // A call whose thread cannot be started is never made, so it must not be linked either.
    if (!thread_.is_running()) [[unlikely]]
      begin();
    (first_ == nullptr ? first_ : last_->next) = &call;
    last_ = &call;
    changed_.notify_all();
  }

  /// Is the call over? Throws if it failed.
  bool test(const QueuedCall& call) const {
    const std::lock_guard lock(mutex_);
    if (call.error) std::rethrow_exception(call.error);
    return call.is_over;
  }
  /// **Host** blocks until the call is over. Throws if it failed.
  void wait(const QueuedCall& call) const {
    settle(call);
    if (call.error) std::rethrow_exception(call.error);
  }
  /// **Host** blocks until the call is over, failed or not.
  void settle(const QueuedCall& call) const noexcept {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return call.is_over; });
  }
  /// **Host** blocks until no call is left, failed or not.
  void drain() const noexcept {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return first_ == nullptr; });
  }

 private:
  /// `run` throws nothing: the calls keep their errors.
  [[gnu::cold, gnu::noinline]] void begin() {
    thread_ = Thread(
        ThreadName{"lockstep calls", "the thread that makes asynchronous calls"}, [this] { run(); },
        [](const std::exception_ptr&) {});
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopping_ || first_ != nullptr; });
      if (first_ == nullptr) return;
      QueuedCall& call = *first_;
      lock.unlock();
      std::exception_ptr error;
      try {
        call.make(call);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      first_ = call.next;
      call.error = error;
      call.is_over = true;  // from here on its owner may end it
      changed_.notify_all();
    }
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  QueuedCall* first_ = nullptr;
  QueuedCall* last_ = nullptr;
  bool stopping_ = false;
  Thread thread_;  // declared last: it uses the members above
};

/// The `Pending` of a `Work` whose call, `f()`, a queue makes. `Owner` has the queue, and its
/// `give_up()` ends the calls under way.
template <class Owner, class F>
class PendingInQueue : QueuedCall {
 public:
  PendingInQueue(Owner& owner, F f) : owner_(owner), f_(std::move(f)) {
    make = [](QueuedCall& call) { static_cast<PendingInQueue&>(call).f_(); };
    owner.queue().post(*this);
  }
  PendingInQueue(const PendingInQueue&) = delete;
  PendingInQueue& operator=(const PendingInQueue&) = delete;
  ~PendingInQueue() { owner_.queue().settle(*this); }

  bool test() { return owner_.queue().test(*this); }
  void wait() { owner_.queue().wait(*this); }
  void leave() {
    owner_.give_up();
    owner_.queue().settle(*this);
  }

 private:
  Owner& owner_;
  F f_;
};

}  // namespace lockstep::detail

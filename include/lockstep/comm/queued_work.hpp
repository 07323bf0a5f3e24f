// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The handle of a call that another thread makes.

#include <exception>
#include <memory>
#include <utility>

#include "lockstep/comm/queue.hpp"

namespace lockstep {

/// A call under way. The handle stays where it was made and waits when it goes out of scope.
/// `Owner` has the queue, knows whether calls have failed (`is_broken`), and can `give_up` what is
/// under way.
template <class Owner>
class QueuedWork {
 public:
  QueuedWork(Owner& owner, std::shared_ptr<QueuedCall> call)
      : owner_(owner), call_(std::move(call)), exceptions_(std::uncaught_exceptions()) {}
  QueuedWork(const QueuedWork&) = delete;
  QueuedWork& operator=(const QueuedWork&) = delete;

  ~QueuedWork() noexcept(false) {
    if (waited_ || owner_.queue().is_over(*call_)) return;
    // Driven out by an exception, the data goes too, and nothing may use it any longer.
    if (std::uncaught_exceptions() != exceptions_) {
      owner_.give_up();
    } else if (!owner_.is_broken()) {
      wait();
    }
    owner_.queue().drain();
  }

  /// Is the call over? **Host** does not block.
  bool test() { return owner_.queue().test(*call_); }

  /// **Host** blocks until the result is here.
  void wait() {
    waited_ = true;
    owner_.queue().wait(*call_);
  }

 private:
  Owner& owner_;
  std::shared_ptr<QueuedCall> call_;
  bool waited_ = false;
  int exceptions_;
};

}  // namespace lockstep

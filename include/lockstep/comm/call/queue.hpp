// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Asynchronous calls of communicators that block: a thread makes them, in the order of
/// posting.

#include <utility>

#include "lockstep/core/worker.hpp"

namespace lockstep::detail {

/// The queue of a communicator. Calls of a broken one fail at once, so its end does not hang.
struct CallQueue : TaskQueue {
  CallQueue() : TaskQueue({"lockstep calls", "the thread that makes asynchronous calls"}) {}
};

/// The `Pending` of a `Work` whose call, `f()`, a queue makes. `Owner` has the queue, and its
/// `give_up()` ends the calls under way.
template <class Owner, class F>
class PendingInQueue : Task {
 public:
  PendingInQueue(Owner& owner, F f) : owner_(owner), f_(std::move(f)) {
    run = [](Task& task) { static_cast<PendingInQueue&>(task).f_(); };
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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The handle of a call that another thread makes for a GPU's memory.

#include <exception>
#include <memory>
#include <utility>

#include "lockstep/comm/waiting/queue.hpp"
#include "lockstep/comm/queued_work.hpp"
#include "lockstep/comm/adapters/staged/engine.cuh"

namespace lockstep {

/// A call under way. The handle stays where it was made and waits when it goes out of scope.
template <class Inner>
class StagedWork {
 public:
  /// Without events the memory is the host's.
  StagedWork(staged::Engine<Inner>& engine, std::shared_ptr<QueuedCall> call,
             std::shared_ptr<const staged::CallEvents> events)
      : engine_(engine), events_(std::move(events)), queued_(engine, std::move(call)) {}
  StagedWork(const StagedWork&) = delete;
  StagedWork& operator=(const StagedWork&) = delete;

  ~StagedWork() noexcept(false) {
    if (!waited_ && std::uncaught_exceptions() == exceptions_ && !engine_.is_broken()) wait();
  }

  /// Is the result there? **Host** does not block.
  bool test() { return queued_.test() && (events_ == nullptr || events_->done.test()); }

  /// **Host** blocks until the result is on its way to the GPU. **Stream** what the compute stream
  /// is given from here on sees it.
  void wait() {
    waited_ = true;
    queued_.wait();
    if (events_ != nullptr) events_->done.block(engine_.stream());
  }

 private:
  staged::Engine<Inner>& engine_;
  std::shared_ptr<const staged::CallEvents> events_;
  bool waited_ = false;
  int exceptions_ = std::uncaught_exceptions();
  QueuedWork<staged::Engine<Inner>> queued_;
};

}  // namespace lockstep

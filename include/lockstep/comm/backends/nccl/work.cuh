// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The handle of an asynchronous call through NCCL.

#include <exception>

#include "lockstep/comm/backends/nccl/engine.cuh"

namespace lockstep::nccl {

/// A call under way. The handle stays where it was made and waits when it goes out of scope.
class Work {
 public:
  Work(Engine& engine, Ticket ticket)
      : engine_(engine), ticket_(ticket), exceptions_(std::uncaught_exceptions()) {}
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  ~Work() noexcept(false) {
    if (std::uncaught_exceptions() == exceptions_ && !engine_.link().is_broken()) wait();
  }

  /// Is the call over? Never so for one that is being captured. **Host** does not block.
  bool test() { return engine_.test(ticket_); }

  /// **Host** does not block. **Stream** what the compute stream is given from here on sees the
  /// result.
  void wait() {
    if (!waited_) engine_.order(ticket_);
    waited_ = true;
  }

 private:
  Engine& engine_;
  Ticket ticket_;
  bool waited_ = false;
  int exceptions_;
};

}  // namespace lockstep::nccl

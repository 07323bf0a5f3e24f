// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A collective under way in shared memory: posted, then worked on, then done.

#include <cstdint>

#include "lockstep/comm/backends/shm/engine.hpp"
#include "lockstep/comm/backends/shm/helper.hpp"

namespace lockstep::detail::shm {

/// `Execute` is this rank's share of the work, called once with the call's ticket when all ranks
/// have posted. It is a type of its own, so that waiting for the call in order is a direct call.
template <class Execute, bool Helped>
class Pending : PostedCall {
 public:
  /// **Ranks** all. **Host** returns at once. `others_read`: this rank's memory is in use until all
  /// ranks are done.
  template <class Fill>
  Pending(Engine& engine, const Call& call, std::uint64_t offset, const Fill& fill,
          bool others_read, Execute execute)
      : engine_(engine), others_read_(others_read), execute_(execute) {
    const EngineLock<Helped> lock(engine);
    ticket = engine.post(call, offset, fill);
    finish = [](PostedCall& posted) { static_cast<Pending&>(posted).finish_work(); };
    engine.add(*this);
  }
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  bool test() {
    const EngineLock<Helped> lock(engine_);
    engine_.raise_fault();
    if (!worked_) {
      while (!engine_.is_next(ticket)) {
        if (!engine_.all_arrived(engine_.next().ticket)) return false;
        engine_.finish_next();
      }
      if (!engine_.all_arrived(ticket)) return false;
      finish_work();
    }
    done_ = done_ || !others_read_ || engine_.all_finished(ticket);
    return done_;
  }

  void wait() {
    const EngineLock<Helped> lock(engine_);
    if (done_) return;
    engine_.raise_fault();
    if (!worked_) {
      engine_.finish_pending(ticket);
      finish_work();
    }
    if (done_) return;
    done_ = true;
    engine_.wait_finished(ticket);
  }

  /// The call's memory may be freed now, so this rank gives the communicator up.
  void leave() {
    const EngineLock<Helped> lock(engine_);
    if (!done_) engine_.abandon(ended_by_exception);
  }

 private:
  void finish_work() {
    worked_ = done_ = true;  // set first: a call that fails is over
    engine_.wait_arrived(ticket);
    execute_(ticket);
    engine_.finish(ticket);
    done_ = !others_read_;
  }

  Engine& engine_;
  bool others_read_;
  Execute execute_;
  bool worked_ = false;
  bool done_ = false;
};

}  // namespace lockstep::detail::shm

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A collective under way: posted, then worked on, then done.

#include <cstdint>
#include <exception>

#include "lockstep/comm/shm/engine.hpp"
#include "lockstep/comm/shm/helper.hpp"

namespace lockstep::shm {

/// The handle of an asynchronous call. `Execute` is this rank's share of the work, called once when
/// all ranks have posted; a type of its own, so that waiting for it is a direct call. The handle
/// stays where it was made and waits when it goes out of scope.
template <class Execute, bool Helped>
class Work : Pending {
 public:
  /// Ranks: all. Host: returns at once. `others_read`: this rank's memory is in use until all are
  /// done.
  template <class Fill>
  Work(Engine& engine, const Call& call, std::uint64_t offset, const Fill& fill, bool others_read,
       Execute execute)
      : engine_(engine),
        others_read_(others_read),
        execute_(execute),
        exceptions_(std::uncaught_exceptions()) {
    const Turn<Helped> turn(engine);
    ticket = engine.post(call, offset, fill);
    finish = [](Pending& pending) { static_cast<Work&>(pending).finish_work(); };
    engine.add(*this);
  }
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  ~Work() noexcept(false) {
    // Driven out by an exception, it is left undone: the communicator's end tells the others.
    if (std::uncaught_exceptions() == exceptions_ && !engine_.is_abandoned()) wait();
  }

  /// Goes on as far as possible without waiting. Host: never blocks. True when the call is done.
  bool test() {
    const Turn<Helped> turn(engine_);
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

  /// Host: blocks until the result is here and this rank's memory is its own again.
  void wait() {
    const Turn<Helped> turn(engine_);
    if (done_) return;
    if (!worked_) {
      engine_.finish_pending(ticket);
      finish_work();
    }
    if (done_) return;
    done_ = true;
    engine_.wait_finished(ticket);
  }

 private:
  void finish_work() {
    worked_ = done_ = true;  // should it fail, it is over
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
  int exceptions_;
};

}  // namespace lockstep::shm

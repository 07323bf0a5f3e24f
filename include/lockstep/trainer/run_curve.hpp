// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The length of a learning rate's curve, which a program may leave to its trainer.

#include <cstdint>
#include <utility>

#include "lockstep/trainer/course_state.hpp"

namespace lockstep::detail {

/// A curve without a length is as long as the epochs of one `epochs` call, and begins with each
/// such call anew. `wrapped` is the strategy whose schedule it is.
class RunCurve {
 public:
  /// A call of `epochs` begins.
  void begin_run() { run_begins_ = true; }

  /// An epoch of so many updates begins, of which so many are over. A curve that goes on stays
  /// where it was; where an epoch has another number of updates now, it goes on at the same
  /// fraction of the epoch.
  template <class Wrapped>
  void place(Wrapped& wrapped, std::uint64_t epoch, std::uint64_t epochs, std::uint64_t updates,
             std::uint64_t over) {
    if constexpr (requires { wrapped.schedule().steps = 0; }) {
      const bool own = is_own(wrapped);
      if (std::exchange(run_begins_, false) && own) {
        run_steps_ = wrapped.schedule().steps = epochs * updates;
        const bool stays = std::exchange(goes_on_, false) && epoch_updates_ == updates;
        if (!stays) wrapped.begin_schedule(epoch * updates + over);
      }
    }
    epoch_updates_ = updates;
  }

  /// Has the program left the length of the curve to its trainer?
  template <class Wrapped>
  bool is_own(Wrapped& wrapped) const {
    if constexpr (requires { wrapped.schedule().steps = 0; })
      return wrapped.schedule().steps == 0 || wrapped.schedule().steps == run_steps_;
    return false;
  }
  /// Numbers were loaded, with the curve of another run. Where it was this trainer's before
  /// (`had_own`), the next `epochs` begin it anew.
  template <class Wrapped>
  void adopt(Wrapped& wrapped, bool had_own) {
    if constexpr (requires { wrapped.schedule().steps = 0; }) {
      if (had_own) run_steps_ = wrapped.schedule().steps;
    }
  }

  // For checkpoints.

  void tell(CourseState& course) const {
    course.run_steps = run_steps_;
    course.epoch_updates = epoch_updates_;
  }
  void go_on(const CourseState& course) {
    run_steps_ = course.run_steps;
    epoch_updates_ = course.epoch_updates;
    goes_on_ = true;
  }
  /// The run that was to go on is over.
  void forget() { goes_on_ = false; }

 private:
  std::uint64_t run_steps_ = 0;      // the length that the trainer has given it
  std::uint64_t epoch_updates_ = 0;  // of a whole epoch
  bool run_begins_ = false;
  bool goes_on_ = false;  // where it was when a checkpoint was written
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How far the loops of a trainer are: what a checkpoint has of it beside the model, the
/// optimizer and the position in the data.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/macros.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/observe/scores.hpp"
#include "lockstep/observe/summary.hpp"

namespace lockstep::detail {

/// The state is the same on all ranks. Calls of `epochs`, and loops over data in an epoch, are
/// counted from 1, so that a program that is run again goes on in the one that was under way.
struct CourseState {
  std::uint64_t run = 0;    ///< calls of `epochs`
  std::uint64_t epoch = 0;  ///< the epoch that is under way, or the next; from 0
  std::uint64_t loop = 0;   ///< loops over data that this epoch has begun
  bool loop_is_over = false;
  bool is_closed = false;  ///< has the epoch added up the losses of its data?

  /// Of the epoch so far, or of the last where none is under way; without its loss and scores.
  EpochSummary figures{};
  double loss = 0;             ///< the mean so far; over all ranks where the data is closed
  std::vector<double> losses;  ///< sum and samples of every rank
  std::string score_names;     ///< of scores that the epoch's line shows: each ends in a newline
  std::vector<double> score_means;
  std::vector<double> score_counts;
  std::uint64_t skipped = 0;  ///< updates left out before this epoch

  // The curve of the learning rate, where the trainer has given it its length.
  std::uint64_t run_steps = 0;
  std::uint64_t epoch_updates = 0;  ///< of a whole epoch

  // Of a job that goes on there. Calls of `epochs` and loops over data that were over are passed
  // over; the one that was under way goes on at its place.
  std::optional<SamplerState> position{};
  bool has_figures = true;  ///< else a position alone was given

  /// The figures with the loss.
  EpochSummary shown() const;
  std::vector<Score> scores() const;
  void set_scores(const std::vector<Score>& scores);

  /// The totals of the losses that rank `rank` of `world` goes on with: the same ones in a world of
  /// the same size; otherwise all are somewhere.
  std::vector<double> losses_of(std::size_t rank, std::size_t world) const;

  /// Was the epoch's loop of this number, from 1, over? Was it under way?
  bool is_over(std::uint64_t number) const {
    return number < loop || (number == loop && loop_is_over);
  }
  bool resumes(std::uint64_t number) const { return number == loop && !loop_is_over; }

  /// How many of an epoch's updates are over where the loop goes on.
  std::uint64_t updates_before(std::uint64_t updates) const;
};

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

/// A saved position as a place in the data of ranks that have different numbers of samples. That
/// may be over already: ranks draw in step as long as they have something to draw.
template <class Sampler>
SamplerState place_in_uneven(const Sampler& fresh, SamplerState at) {
  if (at.world == fresh.world() && at.first == 0) {
    at.samples = fresh.samples();
    at.position = std::min(at.position, fresh.size());
  }
  return at;
}

}  // namespace lockstep::detail

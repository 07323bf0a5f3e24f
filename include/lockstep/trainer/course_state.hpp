// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How far the loops of a trainer are: what a checkpoint has of it beside the model, the
/// optimizer and the position in the data.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/core/macros.hpp"
#include "lockstep/observe/scores.hpp"
#include "lockstep/observe/summary.hpp"
#include "lockstep/trainer/kept_values.hpp"

namespace lockstep::detail {

/// The state is the same on all ranks. Calls of `epochs`, and loops over data in an epoch, are
/// counted from 1, so that a program that is run again goes on in the one that was under way.
struct CourseState {
  std::uint64_t run = 0;    ///< calls of `epochs`
  std::uint64_t epoch = 0;  ///< the epoch that is under way, or the next; from 0
  std::uint64_t loop = 0;   ///< loops over data that this epoch has begun
  bool loop_is_over = false;
  bool is_closed = false;  ///< has the epoch added up the losses of its data?

  // The figures of the epoch so far; of the last epoch where none is under way.
  std::uint64_t shown_epoch = 0;  ///< its number, from 1
  std::uint64_t shown_epochs = 0;
  std::uint64_t steps = 0;
  std::uint64_t samples = 0;
  double seconds = 0;
  double loss = 0;             ///< the mean so far; over all ranks where the data is closed
  std::vector<double> losses;  ///< sum and samples of every rank
  std::string score_names;     ///< of scores that the epoch's line shows: each ends in a newline
  std::vector<double> score_means;
  std::vector<double> score_counts;
  std::uint64_t skipped = 0;  ///< updates left out before this epoch

  // The curve of the learning rate, where the trainer has given it its length.
  std::uint64_t run_steps = 0;
  std::uint64_t epoch_updates = 0;  ///< of a whole epoch

  EpochSummary figures() const;
  void set_figures(const EpochSummary& epoch);
  std::vector<Score> scores() const;
  void set_scores(const std::vector<Score>& scores);

  /// The totals of the losses that rank `rank` of `world` goes on with: the same ones in a world of
  /// the same size; otherwise all are somewhere.
  std::vector<double> losses_of(std::size_t rank, std::size_t world) const;

  /// References to all of it, by the names that a checkpoint has.
  KeptValues values();
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/trainer/course_state.ipp"
#endif

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `course_state.hpp`.

#include <algorithm>

#include "lockstep/trainer/course_state.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE EpochSummary CourseState::figures() const {
  EpochSummary epoch;
  epoch.epoch = shown_epoch;
  epoch.epochs = shown_epochs;
  epoch.steps = steps;
  epoch.samples = samples;
  epoch.seconds = seconds;
  if (samples != 0) epoch.loss = loss;
  return epoch;
}

LOCKSTEP_INLINE void CourseState::set_figures(const EpochSummary& epoch) {
  shown_epoch = epoch.epoch;
  shown_epochs = epoch.epochs;
  steps = epoch.steps;
  samples = epoch.samples;
  seconds = epoch.seconds;
  loss = epoch.loss.value_or(0);
}

LOCKSTEP_INLINE std::vector<Score> CourseState::scores() const {
  std::vector<Score> scores;
  std::size_t at = 0;
  for (std::size_t i = 0; i != std::min(score_means.size(), score_counts.size()); ++i) {
    const std::size_t end = std::min(score_names.find('\n', at), score_names.size());
    scores.push_back({score_names.substr(at, end - at), score_means[i], score_counts[i]});
    at = std::min(end + 1, score_names.size());
  }
  return scores;
}

LOCKSTEP_INLINE void CourseState::set_scores(const std::vector<Score>& scores) {
  for (const Score& score : scores) {
    score_names.append(score.name).append("\n");
    score_means.push_back(score.mean);
    score_counts.push_back(score.count);
  }
}

LOCKSTEP_INLINE std::vector<double> CourseState::losses_of(std::size_t rank,
                                                           std::size_t world) const {
  std::vector<double> own(2);
  for (std::size_t from = rank; 2 * from + 1 < losses.size(); from += world) {
    own[0] += losses[2 * from];
    own[1] += losses[2 * from + 1];
  }
  return own;
}

LOCKSTEP_INLINE KeptValues CourseState::values() {
  return {{"lockstep/run", run},
          {"lockstep/epoch", epoch},
          {"lockstep/loop", loop},
          {"lockstep/loop_is_over", loop_is_over},
          {"lockstep/is_closed", is_closed},
          {"lockstep/shown_epoch", shown_epoch},
          {"lockstep/shown_epochs", shown_epochs},
          {"lockstep/steps", steps},
          {"lockstep/samples", samples},
          {"lockstep/seconds", seconds},
          {"lockstep/loss", loss},
          {"lockstep/losses", losses},
          {"lockstep/score_names", score_names},
          {"lockstep/score_means", score_means},
          {"lockstep/score_counts", score_counts},
          {"lockstep/skipped", skipped},
          {"lockstep/run_steps", run_steps},
          {"lockstep/epoch_updates", epoch_updates}};
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file An optimizer's numbers and count of updates, the same on every device.

#include <cstdint>

#include "lockstep/optim/optimizer.hpp"
#include "lockstep/optim/schedule.hpp"

namespace lockstep::detail {

template <UpdateRule Rule, LearningCurve Curve>
class UpdateClock {
 public:
  typename Rule::Options& options() { return options_; }
  const typename Rule::Options& options() const { return options_; }
  typename Curve::Options& schedule() { return schedule_; }
  const typename Curve::Options& schedule() const { return schedule_; }

  /// Updates made so far.
  std::uint64_t steps() const { return steps_; }
  void set_epoch(std::uint64_t epoch) { epoch_ = epoch; }
  /// The curve goes on from this point: its next update is number `step` of the curve, from 0.
  void begin_schedule(std::uint64_t step) { ahead_ = step - steps_; }

  /// The learning rate of the next update.
  double learning_rate() const {
    return options_.lr * Curve::factor(schedule_, {steps_ + ahead_, epoch_});
  }

  /// The rate of the update that begins now, which is number `steps()`, from 1.
  double advance() {
    const double rate = learning_rate();
    ++steps_;
    return rate;
  }

 private:
  typename Rule::Options options_;
  typename Curve::Options schedule_;
  std::uint64_t steps_ = 0;
  std::uint64_t epoch_ = 0;
  std::uint64_t ahead_ = 0;  // of the curve, modulo 2^64: it can be behind
};

}  // namespace lockstep::detail

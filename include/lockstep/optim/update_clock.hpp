// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file An optimizer's numbers and count of updates, the same on every device.

#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/core/error.hpp"
#include "lockstep/optim/optimizer.hpp"
#include "lockstep/optim/parameter_groups.hpp"
#include "lockstep/optim/progress.hpp"
#include "lockstep/optim/schedule.hpp"

namespace lockstep::detail {

template <UpdateRule Rule, LearningCurve Curve, class Groups = ParameterGroups<>>
class UpdateClock {
 public:
  /// Of group 0, and of a set that is one of the groups.
  typename Rule::Options& options() { return options_.common; }
  const typename Rule::Options& options() const { return options_.common; }
  template <class Set>
  typename Rule::Options& options(Set) {
    return options_.template mine<Set>();
  }
  /// Of all groups, to compare and to copy.
  GroupOptions<Rule, Groups>& group_options() { return options_; }
  const GroupOptions<Rule, Groups>& group_options() const { return options_; }
  typename Curve::Options& schedule() { return schedule_; }
  const typename Curve::Options& schedule() const { return schedule_; }

  /// Updates made so far.
  std::uint64_t steps() const { return steps_; }
  void set_epoch(std::uint64_t epoch) {
    epoch_ = epoch;
    knows_epoch_ = true;
  }
  /// The curve goes on from this point: its next update is number `step` of the curve, from 0.
  void begin_schedule(std::uint64_t step) { ahead_ = step - steps_; }

  /// Adds its part to a job's progress.
  void tell_progress(ReplicaProgress& progress) const {
    progress.updates = steps_;
    progress.epoch = epoch_;
    progress.knows_epoch = knows_epoch_;
    progress.curve_ahead = ahead_;
    list_numbers("optimizer/", options_.common, progress.numbers);
    if constexpr (Groups::count > 1) {
      progress.numbers.push_back({count_of_groups, std::uint64_t{Groups::count}});
      for (std::size_t set = 1; set != Groups::count; ++set) {
        if (const auto& own = options_.own[set - 1])
          list_numbers(prefix_of(set), *own, progress.numbers);
      }
    }
    list_numbers("schedule/", schedule_, progress.numbers);
  }
  /// Goes on from there. Numbers that it does not name stay as they are.
  void take_progress(const ReplicaProgress& progress) {
    steps_ = progress.updates;
    epoch_ = progress.epoch;
    knows_epoch_ = progress.knows_epoch;
    ahead_ = progress.curve_ahead;
    set_numbers("optimizer/", options_.common, progress.numbers);
    if constexpr (Groups::count > 1) {
      // A set that followed group 0 follows it again, unless the groups were other ones.
      if (has_these_groups(progress)) {
        for (std::size_t set = 1; set != Groups::count; ++set) take_set(set, progress);
      }
    }
    set_numbers("schedule/", schedule_, progress.numbers);
  }

  /// The learning rate of the next update.
  double learning_rate() const { return options_.common.lr * factor(); }

  /// The rate of the update that begins now, which is number `steps()`, from 1.
  double advance() {
    if constexpr (requires { Curve::counts_epochs(schedule_); }) {
      if (!knows_epoch_ && Curve::counts_epochs(schedule_)) [[unlikely]]
        refuse();
    }
    if constexpr (Groups::count > 1) factor_ = factor();
    const double rate = learning_rate();
    ++steps_;
    return rate;
  }

  /// The rate of a group in the update that has begun: the schedule's factor is that of all.
  double rate_of(const typename Rule::Options& options) const { return options.lr * factor_; }

 private:
  /// A rate that never changes because nobody counts would pass for training.
  [[noreturn, gnu::cold, gnu::noinline]] static void refuse() {
    throw Error("Schedule<" + std::string(Curve::name) + ">",
                "it counts epochs, and none has begun: this loop is not one of job.epochs()",
                "call set_epoch(number) on the wrapper as each epoch begins, or let the schedule "
                "count updates: schedule().updates = 1000");
  }

  static constexpr const char* count_of_groups = "optimizer/groups";
  static std::string prefix_of(std::size_t set) { return "optimizer/" + std::to_string(set) + "/"; }
  static bool has_these_groups(const ReplicaProgress& progress) {
    for (const NamedNumber& number : progress.numbers) {
      if (number.name == count_of_groups) return number_as<std::uint64_t>(number) == Groups::count;
    }
    return false;
  }
  void take_set(std::size_t set, const ReplicaProgress& progress) {
    const std::string prefix = prefix_of(set);
    auto& own = options_.own[set - 1];
    own.reset();
    for (const NamedNumber& number : progress.numbers) {
      if (!own && number.name.starts_with(prefix)) own = options_.of(set);
    }
    if (own) set_numbers(prefix, *own, progress.numbers);
  }

  double factor() const { return Curve::factor(schedule_, {steps_ + ahead_, epoch_}); }

  GroupOptions<Rule, Groups> options_;
  typename Curve::Options schedule_;
  std::uint64_t steps_ = 0;
  std::uint64_t epoch_ = 0;
  bool knows_epoch_ = false;
  std::uint64_t ahead_ = 0;  // of the curve, modulo 2^64: it can be behind
  double factor_ = 1;        // of the update that has begun, where there are groups
};

}  // namespace lockstep::detail

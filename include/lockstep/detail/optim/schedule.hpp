// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The schedule axis: how the learning rate changes; and a job's step counter and options.

#include <numbers>

#include "lockstep/detail/optim/parameter_groups.hpp"
#include "lockstep/detail/optim/progress.hpp"

namespace lockstep {

namespace axes {
struct Schedule : WithName<"Schedule"> {};
}  // namespace axes

/// The number of updates made so far, and of the epoch, both from 0.
struct SchedulePoint {
  std::uint64_t step = 0;
  std::uint64_t epoch = 0;
};

/// A choice of this axis is a curve: `Options` and the factor of the learning rate at a point. If
/// `counts_epochs(options)`, a loop without a trainer must set the epoch.
template <class C>
concept LearningCurve = NumberOptions<typename C::Options> &&
                        requires(const typename C::Options& options, SchedulePoint point) {
                          { C::factor(options, point) } -> std::same_as<double>;
                        };

/// The learning rate stays as it is.
struct Constant : Choice<axes::Schedule>, WithName<"Constant"> {
  struct Options {
    static constexpr void for_each(const auto&) {}
  };
  static constexpr double factor(const Options&, SchedulePoint) { return 1; }
};

/// PyTorch's StepLR: multiplies the rate by `factor` every `epochs` epochs. A loop without a
/// trainer calls `set_epoch` or sets `updates`; otherwise its first update throws.
struct StepDecay : Choice<axes::Schedule>, WithName<"StepDecay"> {
  struct Options {
    std::uint64_t epochs = 30;
    double factor = 0.1;
    std::uint64_t updates = 0;  ///< if not 0: decay every so many updates instead of epochs
    constexpr void for_each(const auto& f) const {
      f("epochs", epochs);
      f("factor", factor);
      f("updates", updates);
    }
  };
  static constexpr bool counts_epochs(const Options& options) { return options.updates == 0; }
  static double factor(const Options& options, SchedulePoint point) {
    const bool by_epochs = counts_epochs(options);
    if (by_epochs && options.epochs == 0)
      throw Error("Schedule<StepDecay>", "the rate would change every 0 epochs", "give epochs");
    const std::uint64_t times =
        by_epochs ? point.epoch / options.epochs : point.step / options.updates;
    return std::pow(options.factor, static_cast<double>(times));
  }
};

/// A linear warm-up, then half a cosine down to the fraction `last` of the rate, which is reached
/// after `steps` updates and kept. A trainer computes `steps` from its epochs if it is 0.
struct Cosine : Choice<axes::Schedule>, WithName<"Cosine"> {
  struct Options {
    std::uint64_t warmup = 0;
    std::uint64_t steps = 0;
    double last = 0;
    constexpr void for_each(const auto& f) const {
      f("warmup", warmup);
      f("steps", steps);
      f("last", last);
    }
  };
  static double factor(const Options& options, SchedulePoint point) {
    if (options.steps <= options.warmup) {
      throw Error("Schedule<Cosine>",
                  "the curve has " + std::to_string(options.steps) + " steps, of which " +
                      std::to_string(options.warmup) + " are its warm-up",
                  "give it steps, more than its warm-up has");
    }
    if (point.step < options.warmup) {
      return static_cast<double>(point.step + 1) / static_cast<double>(options.warmup);
    }
    const double done = static_cast<double>(std::min(point.step, options.steps) - options.warmup) /
                        static_cast<double>(options.steps - options.warmup);
    return options.last + (1 - options.last) * (1 + std::cos(std::numbers::pi * done)) / 2;
  }
};

static_assert(LearningCurve<Constant> && LearningCurve<StepDecay> && LearningCurve<Cosine>);

/// The policy of the learning rate: `Schedule<Cosine>`.
template <class Curve>
struct Schedule : detail::ChoicePolicy<axes::Schedule, Curve> {};

}  // namespace lockstep

namespace lockstep::detail {

template <UpdateRule Rule, LearningCurve Curve, class Groups = ParameterGroups<>>
class StepCounter {
 public:
  /// The options of group 0, or of a set of the job's parameter groups.
  typename Rule::Options& options() { return options_.common; }
  const typename Rule::Options& options() const { return options_.common; }
  template <class Set>
  typename Rule::Options& options(Set) {
    return options_.template mine<Set>();
  }
  GroupOptions<Rule, Groups>& group_options() { return options_; }
  const GroupOptions<Rule, Groups>& group_options() const { return options_; }
  typename Curve::Options& schedule() { return schedule_; }

  std::uint64_t steps() const { return steps_; }
  void set_epoch(std::uint64_t epoch) {
    epoch_ = epoch;
    knows_epoch_ = true;
  }
  /// Moves the curve: the next update is number `step` of the curve, from 0.
  void begin_schedule(std::uint64_t step) { ahead_ = step - steps_; }

  void report_progress(ReplicaProgress& progress) const {
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
  /// Options that `progress` does not name stay as they are.
  void take_progress(const ReplicaProgress& progress) {
    steps_ = progress.updates;
    epoch_ = progress.epoch;
    knows_epoch_ = progress.knows_epoch;
    ahead_ = progress.curve_ahead;
    set_numbers("optimizer/", options_.common, progress.numbers);
    if constexpr (Groups::count > 1) take_groups(progress.numbers);
    set_numbers("schedule/", schedule_, progress.numbers);
  }

  /// The learning rate of the next update (group 0).
  double learning_rate() const { return options_.common.lr * factor(); }

  /// Begins update `steps()`, from 1. Throws if the schedule needs an epoch and none was set.
  void advance() {
    if constexpr (requires { Curve::counts_epochs(schedule_); }) {
      if (!knows_epoch_ && Curve::counts_epochs(schedule_)) [[unlikely]]
        reject();
    }
    factor_ = factor();
    ++steps_;
  }

  /// A group's learning rate in the current update. All groups share the schedule's factor.
  double rate_of(const typename Rule::Options& options) const { return options.lr * factor_; }

 private:
  /// Without this error, the learning rate would silently never change.
  [[noreturn, gnu::cold, gnu::noinline]] static void reject() {
    throw Error("Schedule<" + std::string(Curve::name) + ">",
                "it counts epochs, and none has begun: this loop is not one of job.epochs()",
                "call set_epoch(number) on the wrapper as each epoch begins, or let the schedule "
                "count updates: schedule().updates = 1000");
  }

  static constexpr const char* count_of_groups = "optimizer/groups";
  static std::string prefix_of(std::size_t set) { return "optimizer/" + std::to_string(set) + "/"; }
  /// A set without saved options follows group 0. Does nothing if the number of groups differs.
  void take_groups(const std::vector<NamedNumber>& numbers) {
    const auto count = std::ranges::find(numbers, count_of_groups, &NamedNumber::name);
    if (count == numbers.end() || number_as<std::uint64_t>(*count) != Groups::count) return;
    for (std::size_t set = 1; set != Groups::count; ++set) {
      const std::string prefix = prefix_of(set);
      auto& own = options_.own[set - 1];
      own.reset();
      if (std::ranges::none_of(numbers,
                               [&](const auto& number) { return number.name.starts_with(prefix); }))
        continue;
      own = options_.of(set);
      set_numbers(prefix, *own, numbers);
    }
  }

  double factor() const { return Curve::factor(schedule_, {steps_ + ahead_, epoch_}); }

  GroupOptions<Rule, Groups> options_;
  typename Curve::Options schedule_;
  std::uint64_t steps_ = 0;
  std::uint64_t epoch_ = 0;
  bool knows_epoch_ = false;
  std::uint64_t ahead_ = 0;  // curve's step - `steps_`, modulo 2^64
  double factor_ = 1;        // of the current update
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The schedule axis: how the learning rate changes from step to step.

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <numbers>
#include <string_view>

#include "lockstep/core/error.hpp"
#include "lockstep/optim/optimizer.hpp"
#include "lockstep/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Schedule : WithName<"Schedule"> {};
}  // namespace axes

/// A job's progress: the updates made so far, and the number of its epoch, both from 0.
struct SchedulePoint {
  std::uint64_t step = 0;
  std::uint64_t epoch = 0;
};

/// A choice of this axis is a curve: `Options`, which are numbers, and the factor by which the
/// optimizer's learning rate is multiplied at a point. One that may count epochs says when, in
/// `counts_epochs(options)`: outside of a trainer, somebody must tell it which epoch it is.
template <class C>
concept LearningCurve = NumberOptions<typename C::Options> &&
                        requires(const typename C::Options& options, SchedulePoint point) {
                          { C::factor(options, point) } -> std::same_as<double>;
                        };

/// The learning rate stays as it is.
struct Constant : Choice<axes::Schedule> {
  static constexpr std::string_view name = "Constant";
  struct Options {
    static constexpr void for_each(const auto&) {}
  };
  static constexpr double factor(const Options&, SchedulePoint) { return 1; }
};

/// The learning rate is multiplied by a factor every so many epochs: PyTorch's StepLR. A trainer
/// knows its epochs; a loop of one's own says them with `set_epoch`, or gives `updates`, which are
/// counted by themselves. One that does neither is told so at its first update.
struct StepDecay : Choice<axes::Schedule> {
  static constexpr std::string_view name = "StepDecay";
  struct Options {
    std::uint64_t epochs = 30;
    double factor = 0.1;
    std::uint64_t updates = 0;  ///< where it is not 0: every so many updates, instead of epochs
    constexpr void for_each(const auto& f) const {
      f("epochs", epochs);
      f("factor", factor);
      f("updates", updates);
    }
  };
  static constexpr bool counts_epochs(const Options& options) { return options.updates == 0; }
  static double factor(const Options& options, SchedulePoint point) {
    if (options.updates != 0) {
      const std::uint64_t times = point.step / options.updates;
      return std::pow(options.factor, static_cast<double>(times));
    }
    if (options.epochs == 0)
      throw Error("Schedule<StepDecay>", "the rate would change every 0 epochs", "give epochs");
    const std::uint64_t times = point.epoch / options.epochs;
    return std::pow(options.factor, static_cast<double>(times));
  }
};

/// A linear warm-up, then half a cosine down to `last`, a fraction of the rate, which is reached
/// after `steps` updates and kept. A trainer fills in `steps` from its epochs where it is 0.
struct Cosine : Choice<axes::Schedule> {
  static constexpr std::string_view name = "Cosine";
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

/// The policy that says how the learning rate changes: `Schedule<Cosine>`.
template <class Curve>
struct Schedule : detail::ChoicePolicy<axes::Schedule, Curve> {};

}  // namespace lockstep

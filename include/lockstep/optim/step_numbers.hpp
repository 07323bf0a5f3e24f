// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The numbers that the update kernels of one step read from device memory.

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "lockstep/core/macros.hpp"
#include "lockstep/optim/anomaly.hpp"
#include "lockstep/optim/clip.hpp"
#include "lockstep/optim/loss_scale.hpp"

namespace lockstep::detail {

/// A rule's constants of one step, and the factor of the gradients, in arithmetic of type A.
template <class Rule, class A>
struct ScaledUpdate {
  decltype(Rule::template at<A>({}, 0.0, 1)) update;
  A scale;
};

/// The numbers of a step, written before its update kernels, which can be replayed.
template <class Rule>
struct StepNumbers {
  ScaledUpdate<Rule, float> in_float;
  ScaledUpdate<Rule, double> in_double;
  bool skip;                // leave everything as it is
  std::uint64_t step = 0;   // the update's number, from 1
  AnomalyWatch watch = {};  // where update kernels look for anomalies

  template <class A>
  LOCKSTEP_HOST_DEVICE constexpr const ScaledUpdate<Rule, A>& in() const {
    if constexpr (std::is_same_v<A, double>) {
      return in_double;
    } else {
      return in_float;
    }
  }
};

/// The numbers of update `step`, counted from 1, of gradients multiplied with `scale`. If no norm
/// is needed, the host computes them and stores them (`launch_store`) before the step or the graph.
template <class Rule>
LOCKSTEP_HOST_DEVICE constexpr StepNumbers<Rule> step_numbers(const typename Rule::Options& options,
                                                              double lr, std::uint64_t step,
                                                              double scale) {
  return {{Rule::template at<float>(options, lr, step), static_cast<float>(scale)},
          {Rule::template at<double>(options, lr, step), scale},
          false,
          step,
          {}};
}

/// The host's part of a step whose numbers depend on the gradients, stored in the same way.
template <class Rule>
struct StepInputs {
  typename Rule::Options options;
  double lr;
  double scale;  // of gradients, before clipping: 1 / micro-batches
  AnomalyWatch watch = {};
};

/// The limits of such a step, the same for all steps.
struct StepLimits {
  double max_norm = std::numeric_limits<double>::infinity();
  bool scales_loss = false;  // and skips what is not finite
  bool skips = false;        // skips what is not finite
  LossScaleOptions loss_scale{};
};

/// The state that such a step leaves to the next, in device memory. A skipped step does not count
/// as an update, as in PyTorch.
struct StepState {
  std::uint64_t updates = 0;
  double norm = 0;  // of the last step's gradients, before clipping
  LossScale loss_scale{};
  bool skipped = false;     // was the last step skipped?
  std::uint64_t skips = 0;  // how many were
};

/// Computes the numbers of a step, clipped and unscaled, from the sum of squares of all gradients.
template <class Rule>
LOCKSTEP_HOST_DEVICE constexpr StepNumbers<Rule> decide_step(const StepInputs<Rule>& inputs,
                                                             double squares,
                                                             const StepLimits& limits,
                                                             StepState& state) {
  using std::sqrt;
  double unscale = inputs.scale;
  state.skipped = false;
  if (limits.scales_loss) {
    unscale /= static_cast<double>(state.loss_scale.scale);
    state.skipped = !is_finite(squares);
    state.loss_scale = next_loss_scale(state.loss_scale, !state.skipped, limits.loss_scale);
  } else if (limits.skips) {
    state.skipped = !is_finite(squares);
  }
  state.norm = sqrt(squares) * unscale;
  if (state.skipped) {
    ++state.skips;
    StepNumbers<Rule> none{};
    none.skip = true;
    return none;
  }
  ++state.updates;
  auto numbers = step_numbers<Rule>(inputs.options, inputs.lr, state.updates,
                                    unscale * clip_factor(state.norm, limits.max_norm));
  numbers.watch = inputs.watch;
  return numbers;
}

}  // namespace lockstep::detail

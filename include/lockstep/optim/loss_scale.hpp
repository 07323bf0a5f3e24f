// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Dynamic loss scaling, for gradients of 16 bits: PyTorch's GradScaler as a pure rule.

#include <cstdint>

#include "lockstep/core/macros.hpp"
#include "lockstep/optim/anomaly.hpp"

namespace lockstep {

/// GradScaler's arguments and their defaults.
struct LossScaleOptions {
  float initial = 65536;
  float growth = 2;
  float backoff = 0.5;
  std::uint32_t interval = 2000;  // good steps until it grows
};

namespace detail {

/// The factor of the loss, which keeps small gradients from vanishing in 16 bits.
struct LossScale {
  float scale = 1;
  std::uint32_t good_steps = 0;  // since it last changed
};

/// A scale below this will not recover: some forty steps in a row have overflowed.
inline constexpr float smallest_loss_scale = 1e-7F;

constexpr LossScale first_loss_scale(const LossScaleOptions& options) {
  return {options.initial, 0};
}

/// The factor of the next step. Gradients that are not finite halve it, and their step is skipped;
/// many good ones in a row double it, unless that would leave the range of float.
LOCKSTEP_HOST_DEVICE constexpr LossScale next_loss_scale(LossScale now, bool finite,
                                                         const LossScaleOptions& options) {
  if (!finite) return {now.scale * options.backoff, 0};
  if (now.good_steps + 1 < options.interval) return {now.scale, now.good_steps + 1};
  const float grown = now.scale * options.growth;
  return {is_finite(grown) ? grown : now.scale, 0};
}

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `going_on.hpp`.

#include <cmath>

#include "lockstep/trainer/going_on.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE GoingOn GoingOn::at(const SamplerState& position) {
  GoingOn there;
  there.course.run = 1;
  there.course.epoch = position.epoch.value();
  there.course.loop = 1;
  there.position = position;
  there.has_figures = false;
  return there;
}

LOCKSTEP_INLINE std::uint64_t GoingOn::updates_before(std::uint64_t updates) const {
  if (!position || position->samples == 0) return 0;
  const auto over =
      static_cast<double>(position->first + position->position * position->world.value());
  const double fraction = std::fmin(over / static_cast<double>(position->samples), 1);
  return static_cast<std::uint64_t>(std::lround(fraction * static_cast<double>(updates)));
}

}  // namespace lockstep::detail

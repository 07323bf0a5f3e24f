// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Where a resumed job goes on: in which call of `epochs`, which epoch and which of its loops
/// over data.

#include <cstdint>
#include <optional>

#include "lockstep/core/macros.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/trainer/course_state.hpp"

namespace lockstep::detail {

/// Calls of `epochs` and loops over data that were over are passed over; the one that was under way
/// goes on at its place.
struct GoingOn {
  CourseState course{};
  std::optional<SamplerState> position{};
  bool has_figures = true;  ///< else a position alone was given

  /// In the first loop over data of the position's epoch.
  static GoingOn at(const SamplerState& position);

  /// Was the epoch's loop of this number, from 1, over? Was it under way?
  bool is_over(std::uint64_t loop) const {
    return loop < course.loop || (loop == course.loop && course.loop_is_over);
  }
  bool resumes(std::uint64_t loop) const { return loop == course.loop && !course.loop_is_over; }

  /// How many of an epoch's updates are over where the loop goes on.
  std::uint64_t updates_before(std::uint64_t updates) const;
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/trainer/going_on.ipp"
#endif

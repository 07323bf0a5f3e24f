// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Where a loop over data is, and where it goes on.

#include <algorithm>
#include <cstdint>
#include <utility>

#include "lockstep/data/sampler.hpp"

namespace lockstep::detail {

/// The place of a loop: after the last batch that was stepped, or that the loop is done with.
class PlaceInData {
 public:
  void begin(const SamplerState& at) { with_batch_ = before_batch_ = at; }
  /// The loop begins, or has the next batch, after so many steps; `over` counts the batch.
  void set_steps(std::uint64_t steps) { steps_before_batch_ = steps; }
  void note_batch(const SamplerState& over, std::uint64_t steps) {
    before_batch_ = std::exchange(with_batch_, over);
    set_steps(steps);
  }
  /// The loop is done with its batch, whether or not that was stepped.
  void end_batch() { before_batch_ = with_batch_; }

  const SamplerState& after(std::uint64_t steps) const {
    return steps > steps_before_batch_ ? with_batch_ : before_batch_;
  }

 private:
  SamplerState with_batch_;
  SamplerState before_batch_;
  std::uint64_t steps_before_batch_ = 0;
};

/// A saved position as a place in the data of ranks that have different numbers of samples. That
/// may be over already: ranks draw in step as long as they have something to draw.
template <class Sampler>
SamplerState place_in_uneven(const Sampler& fresh, SamplerState at) {
  if (at.world == fresh.world() && at.first == 0) {
    at.samples = fresh.samples();
    at.position = std::min(at.position, fresh.size());
  }
  return at;
}

}  // namespace lockstep::detail

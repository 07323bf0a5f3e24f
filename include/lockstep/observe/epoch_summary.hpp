// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The figures of an epoch, as a line of text for people or of JSON for programs.

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/json.hpp"
#include "lockstep/observe/scores.hpp"

namespace lockstep {

/// The figures of one epoch, as they are printed and logged.
struct EpochSummary {
  std::uint64_t epoch = 1;   // from 1, as it is shown
  std::uint64_t epochs = 0;  // 0: not known
  std::uint64_t steps = 0;
  std::uint64_t samples = 0;
  double seconds = 0;
  std::optional<double> loss = {};  // the mean over samples with a known loss
  Scores scores = {};               // of an evaluation, where there was one

  double samples_per_second() const {
    return seconds > 0 ? static_cast<double>(samples) / seconds : 0;
  }

  /// `epoch 3/10`
  std::string title() const;

  /// `epoch 3/10  1875 steps  loss 0.4123  accuracy 0.9712  54321 samples/s  1.1 s`
  std::string text() const;

  JsonLine json() const;
};

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/observe/epoch_summary.ipp"
#endif

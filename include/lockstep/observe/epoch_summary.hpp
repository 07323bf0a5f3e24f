// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What an epoch has come to: for people as a line of text, for programs as one of JSON.

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/observe/json_line.hpp"
#include "lockstep/observe/number_text.hpp"
#include "lockstep/observe/scores.hpp"

namespace lockstep {

struct EpochSummary {
  std::uint64_t epoch = 1;   // from 1, as it is shown
  std::uint64_t epochs = 0;  // 0: not known
  std::uint64_t steps = 0;
  std::uint64_t samples = 0;
  double seconds = 0;
  std::optional<double> loss = {};  // the mean over the samples whose loss was told
  Scores scores = {};               // of an evaluation, where there was one

  double samples_per_second() const {
    return seconds > 0 ? static_cast<double>(samples) / seconds : 0;
  }

  /// `epoch 3/10`
  std::string title() const {
    return "epoch " + std::to_string(epoch) + (epochs == 0 ? "" : "/" + std::to_string(epochs));
  }

  /// `epoch 3/10  1875 steps  loss 0.4123  accuracy 0.9712  54321 samples/s  1.1 s`
  std::string text() const {
    std::string line = title() + "  " + std::to_string(steps) + " steps";
    if (loss) line += "  loss " + value_text(*loss);
    for (const Score& score : scores) line += "  " + score.name + " " + value_text(score.mean);
    return line + "  " + rate_text(samples_per_second()) + " samples/s  " + duration_text(seconds);
  }

  JsonLine json() const {
    JsonLine line;
    line.add("epoch", epoch).add("epochs", epochs).add("steps", steps).add("samples", samples);
    line.add("seconds", seconds);
    if (loss) line.add("loss", *loss);
    for (const Score& score : scores) line.add(score.name, score.mean);
    return line;
  }
};

}  // namespace lockstep

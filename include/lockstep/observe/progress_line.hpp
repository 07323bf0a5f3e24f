// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file An epoch under way as one line that fits the terminal.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/launch/terminal.hpp"
#include "lockstep/observe/epoch_summary.hpp"
#include "lockstep/observe/number_text.hpp"

namespace lockstep {

namespace detail {

inline std::string bar_text(double share, std::size_t cells, bool color) {
  const auto filled = static_cast<std::size_t>(share * static_cast<double>(cells));
  const std::string fill(filled, '#');
  return "  [" + (color ? "\033[32m" + fill + "\033[0m" : fill) + std::string(cells - filled, ' ') +
         "]";
}

}  // namespace detail

/// `epoch 3/10  [######      ]   812/1875  loss 0.4123  54321 samples/s  0:12 left`
///
/// `batches` is how many steps the epoch has; where that is 0, not known, there is neither a bar
/// nor a time. Where the terminal is narrow, the bar goes first, then rate, loss and time; what is
/// no terminal gets everything but the bar.
inline std::string progress_line(const EpochSummary& now, std::uint64_t batches,
                                 const Terminal& terminal) {
  const std::string title = now.title();
  std::string count = std::to_string(now.steps);
  std::string loss;
  std::string rate;
  std::string left;
  if (batches > 0) {
    const std::string all = std::to_string(batches);
    count.insert(0, std::max(all.size(), count.size()) - count.size(), ' ');
    count = "  " + count + "/" + all;
  } else {
    count = "  " + count + " steps";
  }
  if (now.loss) loss = "  loss " + value_text(*now.loss);
  if (now.steps > 0) rate = "  " + rate_text(now.samples_per_second()) + " samples/s";
  if (now.steps > 0 && batches > 0) {
    const std::uint64_t rest = batches - std::min(now.steps, batches);
    const double seconds_each = now.seconds / static_cast<double>(now.steps);
    left = "  " + clock_text(static_cast<double>(rest) * seconds_each) + " left";
  }

  const auto line = [&](const std::string& bar) {
    return title + bar + count + loss + rate + left;
  };
  if (!terminal.is_terminal) return line("");

  // A character in the last column makes some terminals begin a new line.
  const std::size_t room = std::max<std::size_t>(terminal.columns, 1) - 1;
  for (std::string* part : {&rate, &loss, &left}) {
    if (line("").size() > room) part->clear();
  }
  constexpr std::size_t frame = 4;  // two spaces and the brackets
  constexpr std::size_t fewest = 5;
  constexpr std::size_t most = 40;
  const std::size_t width = line("").size() + frame;
  if (batches == 0 || width + fewest > room) return line("").substr(0, room);
  const double share = std::min(1.0, static_cast<double>(now.steps) / static_cast<double>(batches));
  return line(detail::bar_text(share, std::min(most, room - width), terminal.color));
}

}  // namespace lockstep

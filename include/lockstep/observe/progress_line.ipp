// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `progress_line.hpp`.

#include <algorithm>
#include <cstddef>

#include "lockstep/core/text.hpp"
#include "lockstep/observe/progress_line.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::string progress_line(const EpochSummary& now, std::uint64_t batches,
                                          const Terminal& terminal) {
  const std::string title = now.title();
  const std::string steps = detail::text({now.steps});
  std::string count;
  std::string loss;
  std::string rate;
  std::string left;
  if (batches > 0) {
    const std::string all = detail::text({batches});
    const std::string blanks(all.size() > steps.size() ? all.size() - steps.size() : 0, ' ');
    count = detail::text({"  ", blanks, steps, "/", all});
  } else {
    count = detail::text({"  ", steps, " steps"});
  }
  if (now.loss) loss = detail::text({"  loss ", value_text(*now.loss)});
  if (now.steps > 0) rate = detail::text({"  ", rate_text(now.samples_per_second()), " samples/s"});
  if (now.steps > 0 && batches > 0) {
    const std::uint64_t rest = batches - std::min(now.steps, batches);
    const double seconds_each = now.seconds / static_cast<double>(now.steps);
    left = detail::text({"  ", clock_text(static_cast<double>(rest) * seconds_each), " left"});
  }

  const auto line = [&](std::string_view bar) {
    return detail::text({title, bar, count, loss, rate, left});
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
  const std::size_t cells = std::min(most, room - width);
  const auto filled = static_cast<std::size_t>(share * static_cast<double>(cells));
  return line(
      detail::text({"  [", terminal.color ? "\033[32m" : "", std::string(filled, '#'),
                    terminal.color ? "\033[0m" : "", std::string(cells - filled, ' '), "]"}));
}

}  // namespace lockstep::detail

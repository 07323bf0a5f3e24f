// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `epoch_summary.hpp`.

#include "lockstep/core/text.hpp"
#include "lockstep/observe/epoch_summary.hpp"

namespace lockstep {

LOCKSTEP_INLINE std::string EpochSummary::title() const {
  return epochs == 0 ? detail::text({"epoch ", epoch})
                     : detail::text({"epoch ", epoch, "/", epochs});
}

LOCKSTEP_INLINE std::string EpochSummary::text() const {
  std::string line = detail::text({title(), "  ", steps, " steps"});
  if (loss) line += detail::text({"  loss ", value_text(*loss)});
  for (const Score& score : scores) {
    line += detail::text({"  ", score.name, " ", value_text(score.mean)});
  }
  return detail::text({line, "  ", detail::rate_text(samples_per_second()), " samples/s  ",
                       detail::duration_text(seconds)});
}

LOCKSTEP_INLINE JsonLine EpochSummary::json() const {
  JsonLine line;
  line.add("epoch", epoch).add("epochs", epochs).add("steps", steps).add("samples", samples);
  line.add("seconds", seconds);
  if (loss) line.add("loss", *loss);
  for (const Score& score : scores) line.add(score.name, score.mean);
  return line;
}

}  // namespace lockstep

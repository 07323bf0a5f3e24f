// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a job says of a loss or gradient that is NaN or infinite.

#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/core/error.hpp"

namespace lockstep::detail {

inline Error anomaly_error(const std::string& what, std::uint64_t step) {
  return {"step " + std::to_string(step), what,
          "lower the learning rate, clip gradients (Clip<1.0>) or look at the batch; "
          "Anomaly<Skip> leaves such steps out, Anomaly<Ignore> goes on"};
}

/// The error of a gradient at an offset in the arena.
template <class Layout>
Error anomaly_error(const Layout& layout, std::size_t offset, const std::string& value,
                    const std::string& whose, std::uint64_t step) {
  const auto& placements = layout.plan().placements;
  std::size_t p = 0;
  while (p + 1 < placements.size() &&
         !(offset >= placements[p].offset && offset - placements[p].offset < placements[p].bytes))
    ++p;
  const std::size_t size = placements[p].bytes / layout.infos()[p].count();
  return anomaly_error("the gradient of " + std::string(layout.name(p)) + " is " + value +
                           " at element " + std::to_string((offset - placements[p].offset) / size) +
                           (whose.empty() ? "" : ", " + whose),
                       step);
}

}  // namespace lockstep::detail

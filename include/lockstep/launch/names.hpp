// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Lists of names in messages.

#include <cstddef>
#include <string>
#include <vector>

namespace lockstep {

/// The first few of many, so that messages stay readable with a thousand ranks.
inline std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t shown = 16;
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < shown; ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > shown) text += " and " + std::to_string(names.size() - shown) + " more";
  return text;
}

/// `rank 2`, or `ranks 0, 1, 3`.
inline std::string listed_ranks(const std::vector<std::string>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks);
}

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `scores.hpp`.

#include "lockstep/core/error.hpp"
#include "lockstep/observe/scores.hpp"

namespace lockstep {

LOCKSTEP_INLINE bool Scores::contains(std::string_view name) const {
  for (const Score& score : scores_) {
    if (score.name == name) return true;
  }
  return false;
}

LOCKSTEP_INLINE const Score& Scores::find(std::string_view name) const {
  for (const Score& score : scores_) {
    if (score.name == name) return score;
  }
  std::string known;
  for (const Score& score : scores_) {
    known += detail::text({known.empty() ? "there are: " : ", ", score.name});
  }
  if (known.empty()) known = "nothing was counted yet";
  detail::fail("scores", {"there is no '", name, "'"}, known);
}

}  // namespace lockstep

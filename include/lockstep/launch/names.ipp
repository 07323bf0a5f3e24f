// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `names.hpp`.

#include <cstddef>

#include "lockstep/core/text.hpp"
#include "lockstep/launch/names.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t shown = 16;
  std::string list;
  for (std::size_t i = 0; i < names.size() && i < shown; ++i) {
    if (i > 0) list += ", ";
    list += names[i];
  }
  if (names.size() > shown) list += text({" and ", names.size() - shown, " more"});
  return list;
}

LOCKSTEP_INLINE std::string listed_ranks(const std::vector<std::string>& ranks) {
  return text({ranks.size() == 1 ? "rank " : "ranks ", listed(ranks)});
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `deadline.hpp`.

#include "lockstep/core/text.hpp"
#include "lockstep/launch/deadline.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::string seconds_text(std::chrono::milliseconds limit) {
  if (limit.count() % 1000 == 0) return text({limit.count() / 1000, " s"});
  std::string fraction = text({1000 + limit.count() % 1000});
  fraction.erase(fraction.find_last_not_of('0') + 1);
  return text({limit.count() / 1000, ".", fraction.substr(1), " s"});
}

}  // namespace lockstep::detail

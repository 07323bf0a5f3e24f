// SPDX-License-Identifier: Apache-2.0
// Not compiled with LOCKSTEP_COMPILED, unlike the rest of the program: all definitions are here
// too.
#include "job.hpp"

#if defined(LOCKSTEP_COMPILED)
#error "this file is to be compiled without LOCKSTEP_COMPILED"
#endif

namespace link_test {

std::string text_without_library(const Score& score) {
  EpochSummary summary;
  summary.scores = Scores({score});
  return summary.text() + " " + summary.json().text();
}

}  // namespace link_test

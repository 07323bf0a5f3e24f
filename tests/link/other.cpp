// SPDX-License-Identifier: Apache-2.0
#include "job.hpp"

namespace link_test {

std::uint64_t other_fingerprint() { return Job::fingerprint(); }
std::size_t other_offset() { return offset(); }

std::string text_by_library(const Score& score) {
  EpochSummary summary;
  summary.scores = Scores({score});
  return summary.text() + " " + summary.json().text();
}

}  // namespace link_test

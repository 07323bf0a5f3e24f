// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How a job ended: which rank failed first, the consequences, and the text for users.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/launch/child.hpp"
#include "lockstep/launch/failure.hpp"
#include "lockstep/launch/names.hpp"

namespace lockstep::detail {

/// The end of a rank that failed.
struct RankEnd {
  Rank rank;
  ExitStatus status;
  /// The failure that the rank reported, if it ended with an exception.
  std::optional<Failure> failure;

  bool is_consequence() const { return failure && failure->consequence; }
  /// If several ends are noticed at once, the one with the lowest number counts as the first. A
  /// crash is seldom the consequence of another rank's error; the reverse is common.
  int precedence() const { return is_consequence() ? 2 : status.signal == 0 ? 1 : 0; }
};

struct Outcome {
  /// The first failure; none if no rank failed, or if a signal ended the job.
  std::optional<RankEnd> first;
  /// Why the job ended on another node, if that came first.
  std::optional<std::string> elsewhere;
  /// The ranks that failed because of another.
  std::vector<RankEnd> consequences;
  /// SIGINT, SIGTERM or SIGHUP that this process was sent, or 0.
  int interrupted = 0;
  /// The ranks that did not react to SIGTERM.
  std::vector<Rank> stubborn;

  int shell_status() const {
    if (interrupted != 0) return 128 + interrupted;
    if (first) return first->status.shell_status();
    return elsewhere ? 1 : 0;
  }
};

/// A rank that reported a failure, and in which operation.
struct FailedRank {
  std::string_view operation;
  Rank rank;
  bool operator<(const FailedRank& other) const {
    return operation != other.operation ? operation < other.operation : rank < other.rank;
  }
};

/// The ranks that reported a failure, ordered by operation, then by rank. There are few, and a sort
/// of the standard library takes long to compile.
inline std::vector<FailedRank> by_operation(const std::vector<RankEnd>& ends) {
  std::vector<FailedRank> ordered;
  for (const RankEnd& end : ends) {
    if (!end.failure) continue;
    const FailedRank failed{end.failure->operation, end.rank};
    auto place = ordered.begin();
    while (place != ordered.end() && *place < failed) ++place;
    ordered.insert(place, failed);
  }
  return ordered;
}

/// The text after the first failure: which ranks failed because of it, and in which operation, and
/// which ranks had to be killed.
inline std::string summary(const Outcome& outcome) {
  std::string lines;
  if (outcome.interrupted != 0) {
    lines = text({"lockstep: ended by signal ", outcome.interrupted, "\n"});
  }
  if (outcome.first || outcome.elsewhere) {
    const std::vector<FailedRank> fallen = by_operation(outcome.consequences);
    for (std::size_t i = 0; i < fallen.size();) {
      const std::string_view operation = fallen[i].operation;
      std::vector<std::string> ranks;
      for (; i < fallen.size() && fallen[i].operation == operation; ++i) {
        ranks.push_back(text({fallen[i].rank}));
      }
      lines += text(
          {"lockstep: ", listed_ranks(ranks), " failed because of that, in ", operation, "\n"});
    }
  }
  if (!outcome.stubborn.empty()) {
    std::vector<std::string> ranks;
    ranks.reserve(outcome.stubborn.size());
    for (Rank rank : outcome.stubborn) ranks.push_back(text({rank}));
    lines += text({"lockstep: ", listed_ranks(ranks), " did not end when asked (SIGTERM) and ",
                   ranks.size() == 1 ? "was" : "were", " killed\n"});
  }
  return lines;
}

}  // namespace lockstep::detail

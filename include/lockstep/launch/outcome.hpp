// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How a job ended: which rank failed first, what came of it, and how a user reads that.

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/launch/child.hpp"
#include "lockstep/launch/failure.hpp"
#include "lockstep/launch/names.hpp"

namespace lockstep {

/// The end of a rank that failed.
struct RankEnd {
  Rank rank;
  ExitStatus status;
  /// What it told, unless something killed it or it ended without an exception.
  std::optional<Failure> failure;

  bool is_consequence() const { return failure && failure->consequence; }
  /// Of several that are noticed at once the lowest counts as the first: a crash is seldom the
  /// consequence of another rank's error, the reverse is common.
  int precedence() const { return is_consequence() ? 2 : status.signal == 0 ? 1 : 0; }
};

struct Outcome {
  /// Empty when nobody failed, or when a signal ended the job.
  std::optional<RankEnd> first;
  /// Why the job ended on another node, where that came first.
  std::optional<std::string> elsewhere;
  /// Who failed because of another rank.
  std::vector<RankEnd> consequences;
  /// SIGINT, SIGTERM or SIGHUP that this process was sent, or 0.
  int interrupted = 0;
  /// Who did not react to SIGTERM.
  std::vector<Rank> stubborn;

  int shell_status() const {
    if (interrupted != 0) return 128 + interrupted;
    if (first) return first->status.shell_status();
    return elsewhere ? 1 : 0;
  }
};

/// What a user reads last, after the first failure: who failed of it, and where (not their whole
/// messages, which repeat the first one's), and who had to be killed.
inline std::string summary(const Outcome& outcome) {
  const auto name = [](Rank rank) { return std::to_string(rank.value()); };
  std::string text;
  if (outcome.interrupted != 0) {
    text = "lockstep: ended by signal " + std::to_string(outcome.interrupted) + "\n";
  }
  std::vector<RankEnd> fallen = outcome.consequences;
  std::ranges::sort(fallen, {}, &RankEnd::rank);
  std::map<std::string, std::vector<std::string>> ranks_in;
  for (const RankEnd& end : fallen) {
    if ((outcome.first || outcome.elsewhere) && end.failure)
      ranks_in[end.failure->operation].push_back(name(end.rank));
  }
  for (const auto& [operation, ranks] : ranks_in) {
    text += "lockstep: " + listed_ranks(ranks) + " failed because of that, in " + operation + "\n";
  }
  if (!outcome.stubborn.empty()) {
    std::vector<std::string> ranks(outcome.stubborn.size());
    std::ranges::transform(outcome.stubborn, ranks.begin(), name);
    text += "lockstep: " + listed_ranks(ranks) + " did not end when asked (SIGTERM) and " +
            (ranks.size() == 1 ? "was" : "were") + " killed\n";
  }
  return text;
}

}  // namespace lockstep

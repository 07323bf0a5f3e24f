// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How a job ended: which rank failed first, the consequences, and the text for users.

#include <string.h>
#include <csignal>

#include "lockstep/core/error.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// How a process ended, as wait() tells it.
struct ExitStatus {
  int code = 0;    // its exit status, if it exited
  int signal = 0;  // the signal that killed it, or 0

  /// The process was asked to stop, has saved its state and ended.
  bool is_stopped() const { return code == stopped_status && signal == 0; }
  bool is_failure() const { return (code != 0 || signal != 0) && !is_stopped(); }
  /// The status that a shell would report.
  int shell_status() const { return signal != 0 ? 128 + signal : code; }
  std::string text() const {
    if (signal == 0) return detail::text({"exit status ", code});
    const char* const name = ::strsignal(signal);
    return detail::text({"killed by signal ", signal, " (", name != nullptr ? name : "?", ")"});
  }
};

/// The end of a rank that failed.
struct RankEnd {
  Rank rank;
  ExitStatus status;
  /// The failure that the rank reported, if it ended with an exception.
  std::optional<Failure> failure;

  bool is_consequence() const { return failure && failure->consequence; }
  /// Was the job started in a wrong way? Starting it again would not help.
  bool is_misstart() const { return failure && failure->operation == "launch"; }
  /// Did the rank end because the launcher ended it?
  bool is_ended() const { return status.signal == SIGTERM || status.signal == SIGKILL; }
  /// `rank 1 failed first (exit status 3)`. A process with several ranks reports which of them it
  /// was.
  std::string words() const {
    const Rank failed = failure && failure->rank ? *failure->rank : rank;
    return text({"rank ", failed, " failed first (", status.text(), ")"});
  }
  /// If several ends are noticed at once, the one with the lowest number counts as the first. A
  /// crash is seldom the consequence of another rank's error; the reverse is common.
  int precedence() const { return is_consequence() ? 2 : status.signal == 0 ? 1 : 0; }
};

/// How the ranks of a job have ended.
struct Outcome {
  /// The first failure; none if no rank failed, or if a signal ended the job.
  std::optional<RankEnd> first;
  /// The ranks that failed because of another.
  std::vector<RankEnd> consequences;
  /// SIGINT, SIGTERM or SIGHUP that has ended the job, or SIGUSR1 that has killed a rank; or 0.
  int interrupted = 0;
  /// Did such a signal come, be it after a failure?
  bool is_unwanted = false;
  /// A rank that failed, not because of another, when the job was ending already.
  std::optional<RankEnd> late;
  /// The ranks that did not react to SIGTERM.
  std::vector<Rank> stubborn;
  /// The ranks that have saved their state and stopped.
  std::vector<Rank> stopped;

  /// Nobody failed, and somebody has stopped.
  bool is_stopped() const {
    return !stopped.empty() && !first && !late && consequences.empty() && stubborn.empty();
  }

  /// May starting them again help, and does nobody want an end?
  bool may_restart() const {
    return first && !first->is_misstart() && !is_unwanted && interrupted == 0;
  }

  int shell_status() const {
    if (is_stopped()) return stopped_status;
    // Some have saved and another could not: its failure counts.
    if (interrupted != 0 && !stopped.empty() && late) return late->status.shell_status();
    if (interrupted != 0) return 128 + interrupted;
    return first ? first->status.shell_status() : 0;
  }
};

/// The text after the first failure: which ranks failed because of it, and in which operation, and
/// which ranks had to be killed.
inline std::string summary(const Outcome& outcome) {
  std::string lines;
  if (outcome.interrupted != 0 && !outcome.is_stopped()) {
    lines = text({"lockstep: ended by signal ", outcome.interrupted, "\n"});
  }
  std::vector<std::pair<std::string_view, Rank>> fallen;  // by operation, then by rank
  for (const RankEnd& end : outcome.consequences) {
    if (!end.failure || !outcome.first) continue;
    const std::pair<std::string_view, Rank> fell(end.failure->operation, end.rank);
    fallen.insert(std::upper_bound(fallen.begin(), fallen.end(), fell), fell);
  }
  std::vector<std::string> ranks;
  for (std::size_t i = 0; i < fallen.size(); ++i) {
    ranks.push_back(text({fallen[i].second}));
    if (i + 1 < fallen.size() && fallen[i + 1].first == fallen[i].first) continue;
    lines += text(
        {"lockstep: ", listed_ranks(ranks), " failed because of that, in ", fallen[i].first, "\n"});
    ranks.clear();
  }
  for (const Rank rank : outcome.stubborn) ranks.push_back(text({rank}));
  if (ranks.empty()) return lines;
  return lines += text({"lockstep: ", listed_ranks(ranks), " did not end when asked (SIGTERM) and ",
                        ranks.size() == 1 ? "was" : "were", " killed\n"});
}

}  // namespace lockstep::detail

LOCKSTEP_COLD_END

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The outcome of a job: the first failure, its consequences, and the message about them.

#include <string.h>
#include <csignal>

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/store/protocol.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// The error that ended a rank, for its launcher, which knows the first and prints it once.
inline std::string to_bytes(const Error& error) {
  store_protocol::Writer out;
  out.text(error.operation()).text(error.problem()).text(error.advice());
  out.byte(error.rank() ? 1 : 0).u64(error.rank().value_or(Rank{0}).value());
  return out.byte(error.is_consequence() ? 1 : 0).bytes();
}

/// Empty if the rank ended before it had written everything.
inline std::optional<Error> error_from_bytes(std::string_view bytes) {
  store_protocol::Reader in(bytes);
  const std::string_view operation = in.text();
  const std::string_view problem = in.text();
  const std::string_view advice = in.text();
  const bool is_named = in.byte() != 0;
  const Rank rank{in.u64()};
  const Error error(operation, problem, advice, is_named ? std::optional(rank) : std::nullopt);
  const bool is_consequence = in.byte() != 0;
  if (!in.ok()) return std::nullopt;
  return is_consequence ? error.as_consequence() : error;
}

struct RankEnd {
  Rank rank;
  int code = 0;                  // if it exited
  int signal = 0;                // that killed it, or 0
  std::optional<Error> failure;  // reported by a rank that ended with an exception

  /// Stopped on request, with its state saved.
  bool is_stopped() const { return code == stopped_status && signal == 0; }
  bool is_failure() const { return (code != 0 || signal != 0) && !is_stopped(); }
  int shell_status() const { return signal != 0 ? 128 + signal : code; }
  std::string status_text() const {
    if (signal == 0) return text({"exit status ", code});
    const char* const name = ::strsignal(signal);
    return text({"killed by signal ", signal, " (", name != nullptr ? name : "?", ")"});
  }
  bool is_consequence() const { return failure && failure->is_consequence(); }
  /// A launch with wrong options, for which a restart would not help.
  bool is_misstart() const { return failure && failure->operation() == "launch"; }
  bool is_ended() const { return signal == SIGTERM || signal == SIGKILL; }
  /// `rank 1 failed first (exit status 3)`. A process with several ranks reports which one it was.
  std::string message() const {
    const Rank failed = failure ? failure->rank().value_or(rank) : rank;
    return text({"rank ", failed, " failed first (", status_text(), ")"});
  }
  /// Of ends seen together, the lowest is first: a crash is rarely an error's consequence.
  int precedence() const { return is_consequence() ? 2 : signal == 0 ? 1 : 0; }
};

struct Outcome {
  std::optional<RankEnd> first;  // empty if no rank failed, or if a signal ended the job
  std::vector<RankEnd> consequences;
  /// SIGINT, SIGTERM or SIGHUP that ended the job, or SIGUSR1 that killed a rank; 0 if none.
  int interrupted = 0;
  bool is_unwanted = false;     // a signal asked for the end, even after a failure
  std::optional<RankEnd> late;  // an independent failure while the job was ending
  std::vector<Rank> stubborn;   // ranks that did not react to SIGTERM
  std::vector<Rank> stopped;    // ranks that have saved their state

  bool is_stopped() const {
    return !stopped.empty() && !first && !late && consequences.empty() && stubborn.empty();
  }

  bool may_restart() const {
    return first && !first->is_misstart() && !is_unwanted && interrupted == 0;
  }

  int shell_status() const {
    if (is_stopped()) return stopped_status;
    // The failure of a rank counts although others have saved.
    if (interrupted != 0 && !stopped.empty() && late) return late->shell_status();
    if (interrupted != 0) return 128 + interrupted;
    return first ? first->shell_status() : 0;
  }
};

/// Which ranks failed because of the first failure, by operation, and which had to be killed.
inline std::string summary(const Outcome& outcome) {
  std::string lines;
  if (outcome.interrupted != 0 && !outcome.is_stopped()) {
    lines = text({"lockstep: ended by signal ", outcome.interrupted, "\n"});
  }
  std::vector<std::pair<std::string_view, Rank>> fallen;  // sorted by operation and rank
  for (const RankEnd& end : outcome.consequences) {
    if (!end.failure || !outcome.first) continue;
    const std::pair<std::string_view, Rank> fell(end.failure->operation(), end.rank);
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

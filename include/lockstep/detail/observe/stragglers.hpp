// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Names the rank for which all others wait, while a job runs.

#include "lockstep/detail/comm/call/flight_recorder.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// The share of the time since `since` ticks in which this rank was in collectives and others were
/// not yet, from its flight recorders; of as much of that time as they still know.
double waiting_share(Rank job_rank, std::uint64_t since);

/// The rank for which the others wait in so much of their time that it is worth a line, and the
/// share, from all ranks' shares. Ranks that take turns at being late are none.
struct Straggler {
  Rank rank;
  double share;
};
std::optional<Straggler> find_straggler(std::span<const double> shares);

/// Each rank tells the job's store now and then in which share of the time it waited; rank 0
/// compares. No rank waits for another.
class StragglerWatch {
 public:
  using Milliseconds = std::chrono::milliseconds;

  explicit StragglerWatch(const Session& session, Milliseconds pause = Milliseconds(10'000));

  /// Comes often. On rank 0, when a rank has become a straggler: the line that says so.
  std::string look(Session& session);

 private:
  std::string compare(Session& session);

  Milliseconds pause_;
  std::chrono::steady_clock::time_point next_;
  std::uint64_t since_ = ticks_now();
  std::uint64_t looks_ = 0;
  std::vector<std::string> known_;  // on rank 0: what each rank has told last
  std::optional<Rank> last_;        // the straggler of the last comparison
  std::optional<Rank> named_;
};

}  // namespace lockstep::detail

LOCKSTEP_COLD_END

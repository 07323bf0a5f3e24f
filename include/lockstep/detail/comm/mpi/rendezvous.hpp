// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks that a launcher of MPI has started learn from MPI where rank 0 has the job's store.

#include "lockstep/detail/comm/call/peers.hpp"
#include "lockstep/detail/comm/mpi/operation.hpp"
#include "lockstep/detail/core/deadline.hpp"
#include "lockstep/detail/launch/environment.hpp"

namespace lockstep::detail::over_mpi {

inline bool is_rank_of_mpi(Rank rank, WorldSize world) {
  Process::get();
  int ranks = 0;
  int mine = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  MPI_Comm_rank(MPI_COMM_WORLD, &mine);
  return static_cast<std::size_t>(ranks) == world.value() &&
         static_cast<std::size_t>(mine) == rank.value();
}

/// **Host** blocks until rank 0's text is here; throws after the limit.
inline std::string broadcast_text(const std::string& own, Milliseconds limit) {
  constexpr std::size_t most = 1024;
  // Where rank 0 does not come, MPI keeps this memory.
  const auto memory = std::make_shared<std::array<char, most>>();
  own.copy(memory->data(), most);
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Ibcast(memory->data(), most, MPI_CHAR, 0, MPI_COMM_WORLD, &request), "MPI_Ibcast");
  const Deadline deadline = Deadline::after(limit);
  Done done(request);
  poll_until([&] { return done.test() || deadline.passed(); });
  if (request != MPI_REQUEST_NULL) {
    static auto* const kept = new std::vector<std::shared_ptr<std::array<char, most>>>;
    kept->push_back(memory);
    Process::get().leave_request();
    fail("join", {"rank 0 did not open a store within ", seconds_text(limit)},
         "look at its output, or raise the time limit");
  }
  done.await_resume();
  return {memory->data(), most};
}

inline constexpr MpiRendezvous rendezvous{is_rank_of_mpi, broadcast_text};
/// Before `main`, so that `launch` and `join` know that this program has MPI.
inline const bool is_registered = (mpi_rendezvous = &rendezvous, true);

}  // namespace lockstep::detail::over_mpi

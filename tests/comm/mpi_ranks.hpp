// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks that mpirun has started: all of them run the same test cases, the first ones of them
/// with a world.

#include <cstring>
#include <string>
#include <vector>

#include "lockstep/detail/comm/mpi/communicator.hpp"
#include "ranks.hpp"

namespace ranks {

template <class Advance = HelperThread, class Transport = Mpi>
struct UnderMpirun {
  explicit UnderMpirun(std::size_t) {}
  void begin() {}

  MpiCommunicator<dynamic, Advance, Transport> join(Rank rank, WorldSize world,
                                                    std::chrono::milliseconds timeout) const {
    std::vector<Rank> members;
    for (std::size_t r = 0; r < world.value(); ++r) members.emplace_back(r);
    MPI_Comm group = over_mpi::make_group(MPI_COMM_WORLD, members);
    Membership member{rank, world};
    member.timeout = timeout;
    MpiCommunicator<dynamic, Advance, Transport> comm(member, group);
    MPI_Comm_free(&group);
    return comm;
  }

  /// How every rank ended, on all ranks.
  static Ends run_here(std::size_t world, const RankFunction& function) {
    const Watchdog watchdog(120s);
    over_mpi::Process::get();
    int rank = 0;
    int size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    require(world <= static_cast<std::size_t>(size), "mpirun has started fewer ranks");
    const auto me = static_cast<std::size_t>(rank);
    const std::string end = me < world ? function.run(function.self, me) : "";
    constexpr std::size_t most = 2048;
    char own[most] = {};
    end.copy(own, most - 1);
    std::vector<char> all(most * static_cast<std::size_t>(size));
    MPI_Allgather(own, most, MPI_CHAR, all.data(), most, MPI_CHAR, MPI_COMM_WORLD);
    Ends ends;
    for (std::size_t r = 0; r < world; ++r) ends.emplace_back(all.data() + r * most);
    return ends;
  }
};

}  // namespace ranks

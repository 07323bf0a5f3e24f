// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How the ranks of a job come to a communicator in shared memory.

#include <cstddef>
#include <string>

#include "lockstep/comm/backends/shm/communicator.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/numbered_meeting.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep {

/// The shared-memory communicator of a job's ranks. `name` tells several of one job apart.
/// **Ranks** all.
/// **Host** blocks until all have come.
template <std::size_t Ranks = dynamic, class Who = Callers>
ShmCommunicator<Ranks, Who> make_shm_communicator(const Membership& member, Store& store,
                                                  const std::string& name = "world") {
  if (member.local_world != member.world.value()) {
    throw Error("shared memory",
                "of the job's " + std::to_string(member.world.value()) + " ranks, " +
                    std::to_string(member.local_world) + " are on this host",
                "Backend<Shm> is for the ranks of one host", member.rank);
  }
  const std::string key =
      "lockstep/shm/" + detail::numbered_meeting(store, member.rank, "shm", name);
  return ShmCommunicator<Ranks, Who>::join(
      member.rank, member.world, member.timeout,
      [&](const std::string& address) { store.set(key, address); },
      [&] { return store.get(key, member.timeout); });
}

}  // namespace lockstep

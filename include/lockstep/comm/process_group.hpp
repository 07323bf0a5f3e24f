// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `init_process_group`: from a launched process to a communicator, for hand-written loops.

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/comm/backends/shm/communicator.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/numbered_meeting.hpp"
#include "lockstep/launch/rendezvous.hpp"
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

/// A rank's place in a job and its communicator, under the names PyTorch's users know.
template <std::size_t Ranks = dynamic>
class ProcessGroup {
 public:
  /// The group of a session that outlives it, such as the one that `launch` gives.
  explicit ProcessGroup(Session& session)
      : session_(&session),
        comm_(make_shm_communicator<Ranks>(session.membership(), session.store())) {}
  explicit ProcessGroup(Session&& session)
      : own_(std::make_unique<Session>(std::move(session))),
        session_(own_.get()),
        comm_(make_shm_communicator<Ranks>(session_->membership(), session_->store())) {}

  Rank rank() const { return session_->rank(); }
  WorldSize world_size() const { return session_->world(); }
  std::size_t local_rank() const { return session_->membership().local_rank; }

  /// The collectives: `group->all_reduce(gradients, Average{})`.
  ShmCommunicator<Ranks>& operator*() { return comm_; }
  ShmCommunicator<Ranks>* operator->() { return &comm_; }

  Store& store() { return session_->store(); }

 private:
  std::unique_ptr<Session> own_;  // outlives the communicator: the store tells who is there
  Session* session_;
  ShmCommunicator<Ranks> comm_;
};

/// Joins as the rank that the environment says: started by lockstep's launcher, torchrun, mpirun or
/// srun, or alone. **Ranks** all. **Host** blocks until all have come.
template <std::size_t Ranks = dynamic>
ProcessGroup<Ranks> init_process_group(std::chrono::milliseconds timeout = default_timeout) {
  return ProcessGroup<Ranks>(join(timeout));
}

/// Joins by `env://`, `tcp://host:port` or `file:///path`. **Ranks** all. **Host** blocks until all
/// have come.
template <std::size_t Ranks = dynamic>
ProcessGroup<Ranks> init_process_group(std::string_view init_method, Rank rank, WorldSize world,
                                       std::chrono::milliseconds timeout = default_timeout) {
  return ProcessGroup<Ranks>(join(init_method, rank, world, timeout));
}

}  // namespace lockstep

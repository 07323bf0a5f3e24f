// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file From a rank of a job to its communicator, where ranks are threads.

#include <cstddef>
#include <string>

#include "lockstep/comm/rank_gpu.cuh"
#include "lockstep/comm/backends/threads/communicator.cuh"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep {

/// The communicator of a job whose ranks are threads of this process, on the GPU that the rank's
/// place on the host gives it. **Ranks** all. **Host** blocks until all have come.
template <std::size_t Ranks = dynamic>
ThreadCommunicator<Ranks> make_thread_communicator(const Membership& member, Store& store,
                                                   const std::string& name = "world") {
  if (member.local_world != member.world.value()) {
    throw Error("Backend<Shm>",
                "of the job's " + std::to_string(member.world.value()) + " ranks, " +
                    std::to_string(member.local_world) + " are on this host",
                "with Device<Cuda> its ranks are threads of one process: start it once, with "
                "--ranks " +
                    std::to_string(member.world.value()),
                member.rank);
  }
  return ThreadCommunicator<Ranks>::join(member, store, gpu_of(member), name);
}

}  // namespace lockstep

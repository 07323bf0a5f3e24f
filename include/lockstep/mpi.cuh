// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a GPU job needs, MPI included: compile and link with what mpicc -show prints.

#include "lockstep/detail/comm/staged.cuh"
#include "lockstep/detail/strategy/gpu_execution.cuh"
#include "lockstep/lockstep.cuh"
#include "lockstep/mpi.hpp"

namespace lockstep {

/// Through pinned memory of the host, by any MPI. The thread that copies also makes asynchronous
/// calls.
template <class Transport>
  requires detail::is_mpi<Transport>
struct Connection<Cuda, Transport> {
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    const Membership& member = session.membership();
    std::shared_ptr<Gpu> gpu = detail::gpu_of_process(member, session.store(), name);
    detail::over_mpi::Process::get().require_threads();
    auto inner = make_mpi_communicator<detail::static_world<Policies>, Callers, Transport>(
        member, session.store(), name);
    return StagedCommunicator<decltype(inner)>(std::move(inner), std::move(gpu));
  }
};

/// Ranks of one host share the pinned memory and reduce in it.
template <class Transport>
  requires detail::is_mpi<Transport>
struct Connection<Cuda, Hierarchical<Shm, Transport>> {
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    std::shared_ptr<Gpu> gpu = detail::gpu_of_process(session.membership(), session.store(), name);
    auto inner =
        Connection<Cpu, Hierarchical<Shm, Transport>>::template make<Policies>(session, name);
    return StagedCommunicator<decltype(inner)>(std::move(inner), std::move(gpu));
  }
};

}  // namespace lockstep

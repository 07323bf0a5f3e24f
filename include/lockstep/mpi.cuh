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
    return make_staged_communicator(
        session.membership(), session.store(), name,
        [](const Membership& member, Store& store, const std::string& known) {
          detail::over_mpi::Process::get().require_threads();
          return make_mpi_communicator<detail::static_world<Policies>, Callers, Transport>(
              member, store, known);
        });
  }
};

/// Ranks of one host share the pinned memory and reduce in it.
template <class Transport>
  requires detail::is_mpi<Transport>
struct Connection<Cuda, Hierarchical<Shm, Transport>> {
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    return make_staged_communicator(
        session.membership(), session.store(), name, [&](const auto&, Store&, const auto&) {
          return Connection<Cpu, Hierarchical<Shm, Transport>>::template make<Policies>(session,
                                                                                        name);
        });
  }
};

}  // namespace lockstep

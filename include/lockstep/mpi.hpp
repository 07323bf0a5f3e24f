// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a CPU job needs, MPI included: compile and link with what mpicc -show prints.

#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/comm/hierarchical/communicator.hpp"
#include "lockstep/detail/comm/mpi/communicator.hpp"
#include "lockstep/detail/comm/mpi/rendezvous.hpp"
#include "lockstep/detail/comm/shm/communicator.hpp"
#include "lockstep/detail/trainer/connection.hpp"
#include "lockstep/lockstep.hpp"

namespace lockstep {

template <class Transport>
  requires detail::is_mpi<Transport>
struct Connection<Cpu, Transport> {
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    return make_mpi_communicator<detail::static_world<Policies>,
                                 typename detail::Pick<axes::Progress, Policies>::choice,
                                 Transport>(session.membership(), session.store(), name);
  }
};

template <class Transport>
  requires detail::is_mpi<Transport>
struct Connection<Cpu, Hierarchical<Shm, Transport>> {
  /// The hierarchy's own thread makes asynchronous calls.
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    return detail::make_hierarchy(
        session.membership(), session.store(), name,
        [](const Membership& member, Store& store, const std::string& known) {
          detail::over_mpi::Process::get().require_threads();
          return make_mpi_communicator<dynamic, Callers, Transport>(member, store, known);
        },
        make_shm_communicator<>);
  }
};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a CPU job needs, MPI included: compile and link with what mpicc -show prints.

#include "lockstep/detail/comm/mpi/communicator.hpp"
#include "lockstep/detail/comm/mpi/rendezvous.hpp"
#include "lockstep/detail/trainer/connection.hpp"
#include "lockstep/lockstep.hpp"

namespace lockstep {

template <class Transport>
  requires std::same_as<Transport, Mpi> || std::same_as<Transport, MpiAnyOrder>
struct Connection<Cpu, Transport> {
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    return make_mpi_communicator<detail::static_world<Policies>,
                                 typename detail::Pick<axes::Progress, Policies>::choice,
                                 Transport>(session.membership(), session.store(), name);
  }
};

}  // namespace lockstep

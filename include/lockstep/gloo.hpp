// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a CPU job needs, Gloo included: link with -lgloo.

#include "lockstep/comm/adapters/hierarchical/gloo.hpp"
#include "lockstep/comm/backends/gloo/communicator.hpp"
#include "lockstep/comm/groups.hpp"
#include "lockstep/lockstep.hpp"
#include "lockstep/trainer/connection.hpp"

namespace lockstep {

template <>
struct Connection<Cpu, Gloo> {
  static constexpr bool ranks_are_threads = false;
  template <class Policies>
  using communicator = GlooCommunicator<detail::Pick<axes::World, Policies>::static_size>;
  template <class Policies>
  static communicator<Policies> make(Session& session, const std::string& name = "world") {
    return communicator<Policies>(session.membership(), session.store(), name);
  }
};

template <>
struct Connection<Cpu, Hierarchical<Shm, Gloo>> {
  static constexpr bool ranks_are_threads = false;
  template <class Policies>
  using communicator = HierarchicalCommunicator<ShmCommunicator<>, GlooCommunicator<>>;
  template <class Policies>
  static communicator<Policies> make(Session& session, const std::string& name = "world") {
    detail::require_world<detail::Pick<axes::World, Policies>::static_size>(session.world(),
                                                                            session.rank());
    return make_hierarchical_communicator(session.membership(), session.store(), name);
  }
};

}  // namespace lockstep

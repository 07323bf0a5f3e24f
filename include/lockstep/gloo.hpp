// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a CPU job needs, Gloo included: link with -lgloo.

#include "lockstep/detail/comm/gloo/communicator.hpp"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/comm/hierarchical/gloo.hpp"
#include "lockstep/detail/trainer/connection.hpp"
#include "lockstep/lockstep.hpp"

namespace lockstep {

template <>
struct Connection<Cpu, Gloo> {
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    return GlooCommunicator<detail::static_world<Policies>>(session.membership(), session.store(),
                                                            name);
  }
};

template <>
struct Connection<Cpu, Hierarchical<Shm, Gloo>> {
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    return make_hierarchical_communicator(session.membership(), session.store(), name);
  }
};

}  // namespace lockstep

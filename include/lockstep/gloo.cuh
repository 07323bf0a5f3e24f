// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a GPU job needs, Gloo included: link with -lgloo.

#include "lockstep/detail/comm/staged.cuh"
#include "lockstep/detail/strategy/gpu_execution.cuh"
#include "lockstep/detail/trainer/connection.hpp"
#include "lockstep/gloo.hpp"
#include "lockstep/lockstep.cuh"

namespace lockstep {

template <>
struct Connection<Cuda, Gloo> {
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    return make_staged_communicator(session.membership(), session.store(), name,
                                    make_gloo_communicator<detail::static_world<Policies>>);
  }
};

template <>
struct Connection<Cuda, Hierarchical<Shm, Gloo>> {
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    return make_staged_communicator(session.membership(), session.store(), name,
                                    make_hierarchical_communicator);
  }
};

}  // namespace lockstep

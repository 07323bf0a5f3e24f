// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a GPU job needs, NCCL included: link with -lnccl.

#include "lockstep/detail/comm/hierarchical/nccl.cuh"
#include "lockstep/detail/comm/nccl/communicator.cuh"
#include "lockstep/detail/strategy/gpu_execution.cuh"
#include "lockstep/detail/trainer/connection.hpp"
#include "lockstep/lockstep.cuh"

namespace lockstep {

template <>
struct Connection<Cuda, Nccl> {
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    return make_nccl_communicator<detail::static_world<Policies>>(session.membership(),
                                                                  session.store(), name);
  }
};

template <>
struct Connection<Cuda, Hierarchical<Shm, Nccl>> {
  static constexpr bool ranks_are_threads = true;
  /// Ranks are threads of one process on each host.
  static constexpr bool spans_processes = true;
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    return make_threaded_nccl_communicator(session.membership(), session.store(), name);
  }
};

}  // namespace lockstep

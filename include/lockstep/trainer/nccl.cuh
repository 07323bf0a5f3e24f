// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Jobs on GPUs whose ranks communicate through NCCL.

#include "lockstep/comm/nccl/communicator.cuh"
#include "lockstep/strategy/gpu_execution.cuh"
#include "lockstep/trainer/connection.hpp"

namespace lockstep {

template <>
struct Connection<Cuda, Nccl> {
  static constexpr bool ranks_are_threads = false;
  template <class Policies>
  using communicator = NcclCommunicator<Pick<axes::World, Policies>::static_size>;
  template <class Policies>
  static communicator<Policies> make(Session& session) {
    return make_nccl_communicator<Pick<axes::World, Policies>::static_size>(session.membership(),
                                                                            session.store());
  }
};

}  // namespace lockstep

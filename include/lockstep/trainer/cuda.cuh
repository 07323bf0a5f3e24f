// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Jobs on GPUs whose ranks are threads of one process, or one alone.

#include "lockstep/comm/cuda_loopback.cuh"
#include "lockstep/comm/rank_gpu.cuh"
#include "lockstep/comm/threads/join.cuh"
#include "lockstep/strategy/gpu_execution.cuh"
#include "lockstep/trainer/connection.hpp"

namespace lockstep {

template <>
struct Connection<Cuda, NoBackend> {
  static constexpr bool ranks_are_threads = false;
  template <class Policies>
  using communicator = CudaLoopbackCommunicator;
  template <class Policies>
  static communicator<Policies> make(Session& session) {
    require_world<1>(session.world(), session.rank());
    return CudaLoopbackCommunicator(gpu_of(session.membership()));
  }
};

template <>
struct Connection<Cuda, Shm> {
  static constexpr bool ranks_are_threads = true;
  template <class Policies>
  using communicator = ThreadCommunicator<Pick<axes::World, Policies>::static_size>;
  template <class Policies>
  static communicator<Policies> make(Session& session) {
    return make_thread_communicator<Pick<axes::World, Policies>::static_size>(session.membership(),
                                                                              session.store());
  }
};

}  // namespace lockstep

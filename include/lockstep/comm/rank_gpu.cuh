// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The GPU of a rank that has been launched.

#include <memory>

#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/stay_near.cuh"
#include "lockstep/device/gpu_sharing.hpp"
#include "lockstep/launch/membership.hpp"

namespace lockstep::detail {

/// The GPU with the number of the rank's place on its host. It becomes this thread's current one,
/// and the thread stays near it.
inline std::shared_ptr<Gpu> gpu_of(const Membership& member) {
  auto gpu = std::make_shared<Gpu>(
      Gpu::of(member.rank, member.local_rank, member.local_world, wants_shared_gpus()));
  stay_near_gpu(member.rank);
  return gpu;
}

}  // namespace lockstep::detail

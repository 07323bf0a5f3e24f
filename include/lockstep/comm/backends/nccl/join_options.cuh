// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The arguments with which a rank joins an NCCL communicator.

#include <chrono>
#include <memory>
#include <string>

#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/launch/store.hpp"

namespace lockstep::detail::nccl {

/// Groups share all but the first three.
struct JoinOptions {
  Rank rank;
  WorldSize world;
  std::string name;  // the communicator's, the same on all its ranks
  std::shared_ptr<Gpu> gpu;
  std::shared_ptr<Store> store;
  std::chrono::milliseconds timeout;
};

}  // namespace lockstep::detail::nccl

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Checks before NCCL's first call that ranks with one GPU have the environment for it.

#include <cuda_runtime_api.h>
#include <stdlib.h>

#include <cstddef>
#include <string>

#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep::detail::nccl {

/// Do ranks of the job share a GPU? A launcher that shows each rank only its own looks the same
/// from inside one process, so that the ranks have to compare. **Ranks** all. **Host** blocks.
inline bool gpus_are_shared(const Membership& member, Store& store, const Gpu& gpu,
                            const std::string& name) {
  char bus[32] = {};
  check_cuda(cudaDeviceGetPCIBusId(bus, sizeof bus, static_cast<int>(gpu.index())),
             "cudaDeviceGetPCIBusId");
  const std::string own = host_identity() + " " + bus;
  const std::string key = "lockstep/nccl/" + name + "/gpu/";
  store.set(key + std::to_string(member.rank.value()), own);
  if (member.local_world <= visible_gpus()) return false;
  bool shared = false;
  for (std::size_t w = 0; w < member.world.value(); ++w) {
    const std::string other = store.get(key + std::to_string(w), member.timeout);
    shared = shared || (w != member.rank.value() && other == own);
  }
  return shared;
}

/// NCCL refuses two ranks that are on one GPU of one host, but not of two hosts. So the environment
/// tells NCCL that each rank is on a host of its own, and ranks talk through sockets, which is slow
/// but good enough to try things out. The launcher sets it before there are threads
/// (launch/shared_gpus.hpp).
inline void require_own_hosts(Rank rank) {
  if (std::getenv("NCCL_HOSTID") != nullptr) return;
  throw Error(
      "Backend<Nccl>", "ranks share a GPU, which NCCL takes for a mistake",
      "start them with lockstep's launcher and LOCKSTEP_SHARE_GPUS=1, or set NCCL_HOSTID to "
      "another word for every rank before it starts",
      rank);
}

}  // namespace lockstep::detail::nccl

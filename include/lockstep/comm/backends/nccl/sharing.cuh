// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What NCCL must be told before its first call where several ranks share a GPU.

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

/// NCCL refuses two ranks that are on one GPU of one host, but not of two hosts. So each is told to
/// be on a host of its own, and they talk through sockets: slow, and good enough for trying out.
/// The launcher says so in their environment, before there are threads (launch/shared_gpus.hpp).
inline void require_own_hosts(Rank rank) {
  if (std::getenv("NCCL_HOSTID") != nullptr) return;
  throw Error(
      "Backend<Nccl>", "ranks share a GPU, which NCCL takes for a mistake",
      "start them with lockstep's launcher and LOCKSTEP_SHARE_GPUS=1, or set NCCL_HOSTID to "
      "another word for every rank before it starts",
      rank);
}

}  // namespace lockstep::detail::nccl

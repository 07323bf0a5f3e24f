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

namespace lockstep::nccl {

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

/// NCCL refuses two ranks that are on one GPU of one host, but not of two hosts. So each gets a
/// host of its own, and they talk through sockets: slow, and good enough for trying out. What the
/// user has set stays.
inline void pretend_to_be_hosts(const Membership& member) {
  const std::string host = member.job + "." + std::to_string(member.rank.value());
  ::setenv("NCCL_HOSTID", host.c_str(), 0);
  // NCCL avoids the loopback interface, and a host without a network has no other.
  if (member.local_world == member.world.value()) ::setenv("NCCL_SOCKET_IFNAME", "lo", 0);
}

}  // namespace lockstep::nccl

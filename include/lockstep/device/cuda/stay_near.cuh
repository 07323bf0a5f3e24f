// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Keeps a rank's thread near its GPU.

#include <cuda_runtime_api.h>

#include <cstdio>
#include <string>

#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/numa.hpp"

namespace lockstep::detail {

/// The current GPU's place on the PCI bus, as /sys writes it.
inline std::string pci_bus_id() {
  int gpu = 0;
  check_cuda(cudaGetDevice(&gpu), "cudaGetDevice");
  char id[32] = {};
  check_cuda(cudaDeviceGetPCIBusId(id, sizeof id, gpu), "cudaDeviceGetPCIBusId");
  for (char& letter : id) {
    if (letter >= 'A' && letter <= 'F') letter += 'a' - 'A';
  }
  return id;
}

/// Binds the calling thread, which is a rank's, to the NUMA node of its current GPU: copies between
/// host and GPU, and launches, need not cross to another socket. Rank 0 says so. Does nothing where
/// a host has one node or does not tell the GPU's, and never gives a thread more cores than it has.
inline void stay_near_gpu(Rank rank) {
  if (!wants_numa()) return;
  const auto place = numa_place("/sys", pci_bus_id(), allowed_cores());
  if (!place || !stay_at(*place) || rank != Rank{0}) return;
  std::fputs(text({"lockstep: rank 0 stays near its GPU, on the cores ", cores_text(place->cores),
                   " of NUMA node ", place->node,
                   ", and so does every rank near its own; LOCKSTEP_NUMA=0 lets them be\n"})
                 .c_str(),
             stderr);
}

}  // namespace lockstep::detail

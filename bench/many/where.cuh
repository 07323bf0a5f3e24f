// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which rank has which GPU, and where the rank's thread may run.

#include <cuda_runtime_api.h>
#include <sched.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <fstream>
#include <string>

#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "lockstep/detail/launch/rendezvous.hpp"

namespace many {

/// The name that the PCI bus and sysfs have for a device: `0000:1b:00.0`.
inline std::string bus_id_of(int device) {
  char text[32] = "";
  lockstep::check_cuda(cudaDeviceGetPCIBusId(text, sizeof text, device), "cudaDeviceGetPCIBusId");
  std::string id(text);
  for (char& c : id) c = static_cast<char>(c >= 'A' && c <= 'F' ? c - 'A' + 'a' : c);
  return id;
}

/// -1 where the machine has no NUMA nodes, or does not say.
inline int numa_node_of(int device) {
  int node = -1;
  std::ifstream("/sys/bus/pci/devices/" + bus_id_of(device) + "/numa_node") >> node;
  return node;
}

/// `0-15,64-79`: the cores on which this thread may run.
inline std::string allowed_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return "unknown";
  std::string text;
  for (int first = 0; first < CPU_SETSIZE; ++first) {
    if (!CPU_ISSET(first, &set)) continue;
    int last = first;
    while (last + 1 < CPU_SETSIZE && CPU_ISSET(last + 1, &set)) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(first);
    if (last != first) text += "-" + std::to_string(last);
    first = last;
  }
  return text;
}

inline std::string place(const lockstep::Membership& member) {
  int device = 0;
  lockstep::check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  cudaDeviceProp properties{};
  lockstep::check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::string uuid;
  for (const char byte : properties.uuid.bytes) {
    char hex[4] = "";
    std::snprintf(hex, sizeof hex, "%02x", static_cast<unsigned>(static_cast<unsigned char>(byte)));
    uuid += hex;
  }
  return "{\"what\": \"rank\", \"rank\": " + std::to_string(member.rank.value()) +
         ", \"local_rank\": " + std::to_string(member.local_rank) +
         ", \"process\": " + std::to_string(::getpid()) +
         ", \"device\": " + std::to_string(device) + ", \"gpu\": \"" + properties.name +
         "\", \"bus\": \"" + bus_id_of(device) + "\", \"uuid\": \"" + uuid.substr(0, 8) +
         "\", \"node\": " + std::to_string(numa_node_of(device)) + ", \"cores\": \"" +
         allowed_cores() + "\"}";
}

/// A line for each rank. **Ranks** all.
void print_places(auto& comm, const lockstep::Membership& member) {
  const auto places = lockstep::all_gather_objects(comm, place(member));
  if (comm.rank() != lockstep::Rank{0}) return;
  for (const std::string& line : places) std::printf("many %s\n", line.c_str());
}

}  // namespace many

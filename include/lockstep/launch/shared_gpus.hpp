// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The environment of ranks that share GPUs, set before a process has threads.
///
/// NCCL refuses two ranks that are on one GPU of one host, but not of two hosts. So each rank
/// pretends to be on a host of its own (NCCL_HOSTID), and ranks talk through sockets, which is slow
/// but good enough to try things out. NCCL avoids the loopback interface unless told otherwise, and
/// a host without a network has no other. Variables that the user has set stay as they are.

#include <glob.h>
#include <stdlib.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/text.hpp"
#include "lockstep/device/gpu_sharing.hpp"
#include "lockstep/launch/placement.hpp"

namespace lockstep::detail {

/// How many paths match a pattern of the shell.
inline std::size_t matching_paths(const char* pattern) {
  glob_t found{};
  const std::size_t count = ::glob(pattern, GLOB_NOSORT, nullptr, &found) == 0 ? found.gl_pathc : 0;
  ::globfree(&found);
  return count;
}

/// How many devices CUDA takes from CUDA_VISIBLE_DEVICES: those before the first invalid entry.
inline std::size_t listed_gpus(std::string_view list) {
  std::size_t count = 0;
  while (!list.empty() && list.front() != ',' && list.front() != '-') {
    ++count;
    const std::size_t comma = list.find(',');
    if (comma == std::string_view::npos) break;
    list.remove_prefix(comma + 1);
  }
  return count;
}

/// The GPUs that a process of this host sees, found without CUDA, which would start threads.
inline std::size_t gpus_in_sight() {
  const char* const list = ::getenv("CUDA_VISIBLE_DEVICES");
  return list != nullptr ? listed_gpus(list) : matching_paths("/dev/nvidia[0-9]*");
}

/// Adds the variables for one rank, as `name=value`: none if every rank of the host has a GPU of
/// its own, or if sharing is not wanted.
inline void add_shared_gpu_variables(std::vector<std::string>& variables, std::string_view job,
                                     Rank rank, std::size_t local_world, bool is_one_host,
                                     std::size_t gpus) {
  if (!wants_shared_gpus() || local_world <= gpus) return;
  if (::getenv("NCCL_HOSTID") == nullptr) {
    variables.push_back(text({"NCCL_HOSTID=", job.empty() ? "lockstep" : job, ".", rank}));
  }
  if (is_one_host && ::getenv("NCCL_SOCKET_IFNAME") == nullptr) {
    variables.emplace_back("NCCL_SOCKET_IFNAME=lo");
  }
}

/// Sets these variables in this process, which another launcher has started. A process that has
/// threads already is left alone, because one of them may be reading the environment.
inline void share_gpus(const RankPlacement& place) {
  std::vector<std::string> variables;
  add_shared_gpu_variables(variables, place.job, place.rank, place.local_world,
                           place.local_world == place.world.value(), gpus_in_sight());
  if (variables.empty() || matching_paths("/proc/self/task/*") != 1) return;
  for (std::string& variable : variables) {
    const std::size_t equals = variable.find('=');
    variable[equals] = '\0';
    ::setenv(variable.c_str(), variable.c_str() + equals + 1, 0);
  }
}

}  // namespace lockstep::detail

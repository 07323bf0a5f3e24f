// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The environment of ranks that share GPUs, prepared before a process has threads.
///
/// NCCL refuses two ranks that are on one GPU of one host, but not of two hosts. So each rank
/// pretends to be on a host of its own (NCCL_HOSTID). NCCL avoids the loopback interface unless
/// told otherwise (NCCL_SOCKET_IFNAME), and a host without a network has no other.
///
/// Whether ranks share is known only when they have met and compared their GPUs. Then the process
/// has threads, and setenv moves memory that another thread may be reading. So where sharing is
/// allowed the variables are there from the beginning, under names that nobody reads, and when they
/// are wanted one byte of the name changes: LCCL_HOSTID becomes NCCL_HOSTID. NCCL reads it when it
/// makes its first communicator, which is later. Variables that the user has set stay as they are.

#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/device/gpu_sharing.hpp"
#include "lockstep/launch/placement.hpp"

namespace lockstep::detail {

class SharedGpuVariables {
 public:
  /// Adds the variables for one rank, as `name=value`: none if sharing is not wanted.
  static void add(std::vector<std::string>& variables, std::string_view job, Rank rank) {
    if (!wants_shared_gpus()) return;
    variables.push_back(text({"LCCL_HOSTID=", job.empty() ? "lockstep" : job, ".", rank}));
    variables.emplace_back("LCCL_SOCKET_IFNAME=lo");
  }

  /// Puts them into the environment of this process, which another launcher has started. A process
  /// that has threads already is left alone.
  static void add_to_this_process(const RankPlacement& place) {
    std::vector<std::string> variables;
    add(variables, place.job, place.rank);
    if (variables.empty() || ::getenv("LCCL_HOSTID") != nullptr || has_other_threads()) return;
    for (std::string& variable : variables) {
      const std::size_t equals = variable.find('=');
      variable[equals] = '\0';
      ::setenv(variable.c_str(), variable.c_str() + equals + 1, 0);
    }
  }

  /// NCCL takes this rank for one on a host of its own. False if it cannot be told.
  static bool use_own_host() { return use("LCCL_HOSTID=", "NCCL_HOSTID"); }
  /// NCCL uses the loopback interface.
  static bool use_loopback() { return use("LCCL_SOCKET_IFNAME=", "NCCL_SOCKET_IFNAME"); }

 private:
  static bool use(std::string_view reserved, const char* name) {
    if (::getenv(name) != nullptr) return true;
    for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
      if (!std::string_view(*variable).starts_with(reserved)) continue;
      std::atomic_ref<char>(**variable).store('N', std::memory_order_relaxed);
      return true;
    }
    return false;
  }
};

}  // namespace lockstep::detail

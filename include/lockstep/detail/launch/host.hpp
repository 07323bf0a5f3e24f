// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The cores of a host divided among its ranks, and ranks that share GPUs.
///
/// OpenMP runtimes, such as LibTorch's, start a thread per core in every process. Several ranks per
/// host would oversubscribe the cores: a small step of LibTorch takes a multiple of its time then.
/// So ranks divide the cores, unless OMP_NUM_THREADS is set, which the runtime reads before `main`.

#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/core/thread.hpp"
#include "lockstep/detail/device/gpu_sharing.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

inline constexpr const char* openmp_variable = "OMP_NUM_THREADS";

inline std::size_t openmp_share(std::size_t ranks) {
  return std::max<std::size_t>(core_count() / std::max<std::size_t>(ranks, 1), 1);
}

inline bool is_openmp_decided() { return std::getenv(openmp_variable) != nullptr; }

/// Prints the share once, if the program has an OpenMP runtime, which is looked up, not linked.
inline void say_openmp_share(std::size_t ranks) {
  static bool is_said = false;
  if (is_said || ranks < 2 || is_openmp_decided()) return;
  if (::dlsym(RTLD_DEFAULT, "omp_get_max_threads") == nullptr) return;
  is_said = true;
  const std::size_t share = openmp_share(ranks);
  const std::size_t cores = core_count();
  write_all(2, text({"lockstep: ", openmp_variable, " is not set, so each of the ", ranks,
                     " ranks here computes with ", share, share == 1 ? " thread" : " threads",
                     ", its share of ", cores, cores == 1 ? " core\n" : " cores\n"}));
}

inline void call_if_found(const char* name, int argument) {
  void* const found = ::dlsym(RTLD_DEFAULT, name);
  if (found != nullptr) reinterpret_cast<void (*)(int)>(found)(argument);
}

/// OpenMP in a forked rank would wait for the parent's threads: such a rank computes with one.
inline void use_openmp_share(std::size_t ranks, bool had_threads) {
  if (had_threads) {
    call_if_found("omp_set_num_threads", 1);
    call_if_found("omp_set_max_active_levels", 0);
    call_if_found("MKL_Set_Num_Threads", 1);
  } else if (!is_openmp_decided()) {
    call_if_found("omp_set_num_threads", static_cast<int>(openmp_share(ranks)));
  }
}

// NCCL rejects two ranks on one GPU of a host, so each rank that shares one claims a host of its
// own (NCCL_HOSTID). NCCL uses loopback, a lone host's only interface, only by NCCL_SOCKET_IFNAME.
//
// Ranks know that they share only after the rendezvous, when other threads may read the environment
// that setenv moves. So where sharing is allowed, the variables are set at the start under unused
// names, and one byte changes before NCCL's first communicator: LCCL_HOSTID becomes NCCL_HOSTID.

/// Adds the variables of one rank, as `name=value`, if sharing is allowed.
inline void add_shared_gpu_variables(std::vector<std::string>& variables, std::string_view job,
                                     Rank rank) {
  if (!wants_shared_gpus()) return;
  variables.push_back(text({"LCCL_HOSTID=", job.empty() ? "lockstep" : job, ".", rank}));
  variables.emplace_back("LCCL_SOCKET_IFNAME=lo");
}

/// Sets them in this process, for ranks of other launchers, unless it has other threads.
inline void prepare_shared_gpus(std::string_view job, Rank rank) {
  std::vector<std::string> variables;
  add_shared_gpu_variables(variables, job, rank);
  if (variables.empty() || ::getenv("LCCL_HOSTID") != nullptr || has_other_threads()) return;
  for (std::string& variable : variables) {
    const std::size_t equals = variable.find('=');
    variable[equals] = '\0';
    ::setenv(variable.c_str(), variable.c_str() + equals + 1, 0);
  }
}

/// Makes a prepared variable, such as "NCCL_HOSTID", visible to NCCL; false if there is none.
inline bool use_shared_gpu_variable(const char* name) {
  if (::getenv(name) != nullptr) return true;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    const std::string_view prepared(*variable);
    if (!prepared.starts_with("LCCL_") ||
        prepared.substr(1, prepared.find('=') - 1) != std::string_view(name).substr(1)) {
      continue;
    }
    std::atomic_ref<char>(**variable).store('N', std::memory_order_relaxed);
    return true;
  }
  return false;
}

}  // namespace lockstep::detail

LOCKSTEP_COLD_END

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What the ranks of one host share: its cores, and its GPUs where a test or a small machine
/// wants that.
///
/// An OpenMP runtime, as LibTorch's and many libraries for matrices have, starts a thread for every
/// core in every process. The ranks of a host would have several threads on each core, which wait
/// for each other at the end of every loop: a small step of LibTorch then takes a multiple of its
/// time. So ranks share the cores, unless OMP_NUM_THREADS says otherwise. The runtime reads that
/// variable when it is loaded, before `main`: a rank gets it with its program.

#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
#include <atomic>
#include <cstdlib>

#include "lockstep/core/file.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/device/gpu_sharing.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

inline constexpr const char* openmp_variable = "OMP_NUM_THREADS";

/// A rank's share of the cores that this process may use.
inline std::size_t openmp_share(std::size_t ranks) {
  return std::max<std::size_t>(core_count() / std::max<std::size_t>(ranks, 1), 1);
}

inline bool is_openmp_decided() { return std::getenv(openmp_variable) != nullptr; }

/// What the launcher says of it, once in a program, where it makes a difference: in one that has an
/// OpenMP runtime. lockstep itself needs none, so it is not linked, but looked for.
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

/// Calls a function of an OpenMP runtime, or of a library that has such threads, if the program has
/// it.
inline void call_if_found(const char* name, int argument) {
  void* const found = ::dlsym(RTLD_DEFAULT, name);
  if (found != nullptr) reinterpret_cast<void (*)(int)>(found)(argument);
}

/// Called by a forked rank, whose runtime has been loaded long ago. It has none of the threads that
/// its parent's runtime had, and would wait for them for ever: a rank of a process that `had
/// threads` computes with one, whatever its libraries were told in the parent.
inline void use_openmp_share(std::size_t ranks, bool had_threads) {
  if (had_threads) {
    call_if_found("omp_set_num_threads", 1);
    call_if_found("omp_set_max_active_levels", 0);
    call_if_found("MKL_Set_Num_Threads", 1);
  } else if (!is_openmp_decided()) {
    call_if_found("omp_set_num_threads", static_cast<int>(openmp_share(ranks)));
  }
}

// Ranks that share GPUs.
//
// NCCL refuses two ranks that are on one GPU of one host, but not of two hosts. So each rank
// pretends to be on a host of its own (NCCL_HOSTID). NCCL avoids the loopback interface unless told
// otherwise (NCCL_SOCKET_IFNAME), and a host without a network has no other.
//
// Whether ranks share is known only when they have met and compared their GPUs. Then the process
// has threads, and setenv moves memory that another thread may be reading. So where sharing is
// allowed the variables are there from the beginning, under names that nobody reads, and when they
// are wanted one byte of the name changes: LCCL_HOSTID becomes NCCL_HOSTID. NCCL reads it when it
// makes its first communicator, which is later. Variables that the user has set stay as they are.

/// Adds the variables for one rank, as `name=value`: none if sharing is not wanted.
inline void add_shared_gpu_variables(std::vector<std::string>& variables, std::string_view job,
                                     Rank rank) {
  if (!wants_shared_gpus()) return;
  variables.push_back(text({"LCCL_HOSTID=", job.empty() ? "lockstep" : job, ".", rank}));
  variables.emplace_back("LCCL_SOCKET_IFNAME=lo");
}

/// Puts them into the environment of this process, which another launcher has started. A process
/// that has threads already is left alone.
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

/// Lets NCCL see a variable that was prepared: "NCCL_HOSTID", by which it takes this rank for one
/// on a host of its own, or "NCCL_SOCKET_IFNAME", the loopback interface. False if there is none.
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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How many threads the ranks of one host compute with, where the program has an OpenMP
/// runtime, as LibTorch's and many libraries for matrices do.
///
/// Such a runtime starts a thread for every core in every process. The ranks of a host would have
/// several threads on each core, which wait for each other at the end of every loop: a small step
/// of LibTorch then takes a multiple of its time. So ranks share the cores, unless OMP_NUM_THREADS
/// says otherwise. The runtime reads that variable when it is loaded, before `main`: a rank gets it
/// with its program.

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>

#include "lockstep/core/file.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"

namespace lockstep::detail {

inline constexpr const char* openmp_variable = "OMP_NUM_THREADS";

/// A rank's share of the cores that this process may use.
inline std::size_t openmp_share(std::size_t ranks) {
  return std::max<std::size_t>(core_count() / std::max<std::size_t>(ranks, 1), 1);
}

inline bool is_openmp_decided() { return std::getenv(openmp_variable) != nullptr; }

/// Has this program an OpenMP runtime? lockstep itself needs none, so it is not linked, but looked
/// for.
inline bool has_openmp() { return ::dlsym(RTLD_DEFAULT, "omp_get_max_threads") != nullptr; }

/// What the launcher says of it, once in a program, where it makes a difference.
inline void say_openmp_share(std::size_t ranks) {
  static bool is_said = false;
  if (is_said || ranks < 2 || is_openmp_decided() || !has_openmp()) return;
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

}  // namespace lockstep::detail

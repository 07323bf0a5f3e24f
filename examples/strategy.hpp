// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `--strategy dp` and `--backend shm`: which of several jobs a program is. `main` must know
/// before it launches one; the job asks again, so that `--help` names them.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "lockstep/launch.hpp"

/// Is the value of an option with two values the second one? Not where the option is not given.
inline bool is_second(int argc, char** argv, const char* name, const char* first,
                      const char* second) {
  try {
    const std::string value = lockstep::ProgramOptions(argc, argv).option(name, first);
    if (value == first || value == second) return value == second;
    std::fprintf(stderr, "--%s is %s or %s\n", name, first, second);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  std::exit(2);
}

/// Replicas in one process, or ranks?
inline bool wants_dp(int argc, char** argv) {
  return is_second(argc, argv, "strategy", "ddp", "dp");
}
void ask_strategy(auto& job) { job.option("strategy", "ddp", "ddp, ranks; or dp, replicas"); }

/// Ranks that are threads of one process, or processes that meet through NCCL?
inline bool wants_shm(int argc, char** argv) {
  return is_second(argc, argv, "backend", "nccl", "shm");
}
void ask_backend(auto& job) { job.option("backend", "nccl", "nccl, processes; or shm, threads"); }

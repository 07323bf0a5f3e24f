// SPDX-License-Identifier: Apache-2.0
// Batch norms on GPUs: norms_gpu --ranks N shm|nccl|gloo|hosts [CHECK], where `hosts` are two that
// ranks of one machine play, with Gloo between them. Threads inside nodes and NCCL between them
// (tests/gpu/nodes_run): norms_gpu --ranks N nodes:CHECK
#include "gpu/norms.hpp"

#include <cstdio>
#include <string>

#include "lockstep/detail/device/cuda/gpu.cuh"

int main(int argc, char** argv) {
  if (lockstep::detail::visible_gpus() == 0) {
    std::puts("compiled and linked; not run: no CUDA device here");
    return 0;
  }
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "shm") return norm_test::run_threads(argc, argv);
#if LOCKSTEP_HAS_NCCL
    if (word == "nccl") return norm_test::run_nccl(argc, argv);
    if (word.starts_with("nodes:")) return norm_test::run_nodes(argc, argv);
#endif
#if LOCKSTEP_HAS_GLOO
    if (word == "gloo") return norm_test::run_gloo(argc, argv);
    if (word == "hosts") return norm_test::run_hosts(argc, argv);
#endif
  }
  std::puts("usage: norms_gpu --ranks N shm|nccl|gloo|hosts [CHECK], of what it was built with");
  return 2;
}

// SPDX-License-Identifier: Apache-2.0
// What a GPU makes of it: a small network's step, the fused kernels on their own, the all-reduce of
// ranks that share a GPU, DP's step; each against its peer in the same run. An argument chooses a
// part: step, kernels, all_reduce or dp.
#include <cuda_runtime.h>

#include <cstdio>
#include <exception>
#include <string>
#include <string_view>

#include "all_reduce.hpp"
#include "dp.hpp"
#include "kernels.hpp"
#include "lockstep/detail/device/cuda/gpu.cuh"
#include "step.hpp"
#include "table.hpp"

int main(int argc, char** argv) try {
  const auto wants = [&](std::string_view part) { return argc < 2 || part == argv[1]; };
  if (lockstep::detail::visible_gpus() == 0) {
    std::fprintf(stderr, "bench gpu: there is no GPU here\n");
    return 1;
  }
  cudaDeviceProp properties{};
  lockstep::check_cuda(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::printf("%s, %d multiprocessors\n", properties.name, properties.multiProcessorCount);
  // One part does not take the place of a whole run's results.
  const std::string file = argc < 2 ? "gpu" : std::string("gpu_") + argv[1];
  if (wants("step")) bench::print_table(bench::compare_steps(), file);
  if (wants("kernels")) bench::print_table(bench::compare_kernels(), file);
  if (wants("all_reduce")) bench::print_table(bench::compare_all_reduce(), file);
  if (wants("dp")) bench::print_table(bench::compare_data_parallel(), file);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench gpu: %s\n", error.what());
  return 1;
}

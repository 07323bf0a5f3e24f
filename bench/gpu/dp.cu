// SPDX-License-Identifier: Apache-2.0
#include "dp.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "device_memory.cuh"
#include "mlp.cuh"
#include "timing.cuh"

namespace bench {
namespace {

using Network = GpuMlp<float, 784, 512, 10>;
using Batch = LabelledBatch<float, std::int32_t>;

Batch random_batch() {
  RandomStream random(Seed{1});
  Batch batch;
  batch.resize(64, 784);
  for (float& x : batch.inputs) x = static_cast<float>(random.normal());
  for (auto& y : batch.labels) y = static_cast<std::int32_t>(random.below(10));
  return batch;
}

std::vector<double> used_mebibytes_of_all() {
  std::vector<double> used;
  for (std::size_t g = 0; g < detail::visible_gpus(); ++g) {
    check_cuda(cudaSetDevice(static_cast<int>(g)), "cudaSetDevice");
    used.push_back(used_mebibytes());
  }
  check_cuda(cudaSetDevice(0), "cudaSetDevice");
  return used;
}

/// Steps from a batch on the host, as PyTorch's DataParallel takes one, and its memory.
template <class... Policies>
Times measure(const std::string& name, std::size_t replicas, const Batch& batch) {
  const auto before = used_mebibytes_of_all();
  DataParallel<Network, Device<Cuda>, Optimizer<SGD>, Policies...> dp({.replicas = replicas});
  dp.optimizer().lr = 0.01;
  for (int i = 0; i < 20; ++i) dp.step(batch);
  dp.synchronize();
  const auto after = used_mebibytes_of_all();
  std::printf("%s: memory", name.c_str());
  for (std::size_t g = 0; g < after.size(); ++g) {
    std::printf("%s GPU %zu %.0f MiB", g == 0 ? "" : ",", g, after[g] - before[g]);
  }
  std::printf("\n");
  constexpr int steps = 500;
  std::vector<double> times;
  for (int round = 0; round < 9; ++round) {
    const auto start = Clock::now();
    for (int i = 0; i < steps; ++i) dp.step(batch);
    dp.synchronize();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() /
                    steps);
  }
  return summary(times);
}

}  // namespace

std::vector<Comparison> compare_data_parallel() {
  ::setenv("LOCKSTEP_SHARE_GPUS", "1", 1);  // where there are fewer GPUs than replicas
  const Batch batch = random_batch();
  const Times torch = torch_data_parallel();
  const std::string what = "DP, MLP 784-512-512-10, batch 64 from the host, SGD, ";
  std::vector<Comparison> rows;
  for (const std::size_t n : {1, 2, 4}) {
    const std::string count = std::to_string(n) + " replicas on " +
                              std::to_string(std::min(n, detail::visible_gpus())) + " GPU";
    rows.push_back({what + count + ": graph against PyTorch's DataParallel",
                    measure<CapturedStep>(count + ", graph", n, batch), torch, 0});
    rows.push_back({what + count + ": call by call against PyTorch's DataParallel",
                    measure<>(count + ", call by call", n, batch), torch, 0});
  }
  return rows;
}

}  // namespace bench

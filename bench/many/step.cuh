// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file DDP's step of a small and of a large network. A rank's batch has the same size however
/// many ranks there are, so a step that takes as long as on one GPU has scaled.

#include <cstddef>
#include <cstdio>
#include <type_traits>
#include <vector>

#include "all_reduce.cuh"
#include "measure.hpp"
#include "resident.cuh"

namespace many {

/// The examples' network: 2.7 MB of gradients, a step of microseconds.
struct Small {
  using Model = GpuMlp<float, 784, 512, 10>;
  static constexpr const char* name = "784-512-512-10, batch 64";
  static constexpr std::size_t rows = 64, inputs = 784;
};
/// 134 MB of gradients, in six buckets.
struct Large {
  using Model = GpuMlp<float, 4096, 4096, 10>;
  static constexpr const char* name = "4096-4096-4096-10, batch 256";
  static constexpr std::size_t rows = 256, inputs = 4096;
};

template <class Network, class... Policies>
void measure_step(auto& comm, const char* way) {
  using Comm = std::remove_cvref_t<decltype(comm)>;
  using Policies_ = CanonicalPolicies<Device<Cuda>, Optimizer<SGD>, Policies...>;
  detail::BasicDdp<typename Network::Model, Policies_, Comm> ddp(comm);
  const bench::Resident data(Network::rows, Network::inputs, 10);
  const auto batch = data.batch();
  ddp.optimizer().lr = 0.001;
  const auto step = [&] { ddp.step(batch); };
  for (int i = 0; i < 20; ++i) step();  // plans are made, the step is captured
  const std::size_t steps = calls_of_a_turn(comm, 500, step);
  std::vector<double> times;
  for (int turn = 0; turn < 7; ++turn) times.push_back(time_calls(comm, steps, step));
  const auto loss = static_cast<double>(ddp.step(batch));
  if (comm.rank() != Rank{0}) return;
  std::printf(
      "many {\"what\": \"step\", \"backend\": \"%s\", \"ranks\": %zu, \"network\": \"%s\", "
      "\"way\": \"%s\", \"us\": %.2f, \"loss\": %.6f}\n",
      std::is_same_v<Comm, NcclCommunicator<>> ? "nccl" : "shm", comm.world_size().value(),
      Network::name, way, bench::median(times), loss);
  std::fflush(stdout);
}

/// A line for each network and way. **Ranks** all.
void measure_steps(auto& comm) {
  measure_step<Small, CapturedStep>(comm, "graph");
  measure_step<Small>(comm, "calls");
  measure_step<Large, CapturedStep>(comm, "graph");
  measure_step<Large>(comm, "calls");
}

}  // namespace many

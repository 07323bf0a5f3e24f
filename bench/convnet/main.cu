// SPDX-License-Identifier: Apache-2.0
// A training step of example 07's network on one GPU, with SGD with momentum, call by call and as a
// CUDA graph, against the same network in PyTorch's DDP, in one run. Microseconds.
//
//   bench_convnet [ROWS]
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdio>
#include <exception>
#include <string>

#include "comparison_table.hpp"
#include "contender.cuh"
#include "convnet.cuh"
#include "cudnn_layers.cuh"
#include "load.hpp"
#include "resident.cuh"

namespace {

using namespace bench;

using Network = GpuConvNet<float, CudnnLayers, 1, 28, 32, 64, 10>;

template <class... Policies>
using Job = Contender<Network, Optimizer<SGDMomentum>, Policies...>;

}  // namespace

int main(int argc, char** argv) try {
  if (lockstep::detail::visible_gpus() == 0) {
    std::fprintf(stderr, "bench convnet: there is no GPU here\n");
    return 1;
  }
  const OthersLoad others;
  const std::size_t rows = argc > 1 ? std::stoul(argv[1]) : 128;
  std::printf("a step of example 07's network, batch %zu, SGD with momentum; microseconds\n\n",
              rows);
  const Resident data(rows, 28 * 28, 10);
  Job<> by_calls(data);
  Job<CapturedStep> captured(data);
  auto torch = measure_beside(
      [&] { return torch_ways("convnet/convnet.py " + std::to_string(rows), "convnet"); }, 1000,
      by_calls, captured);
  const StepTimes eager = by_calls.times();
  const StepTimes graph = captured.times();
  ComparisonTable table;
  table.row("graph against PyTorch DDP eager", graph.wall, torch["eager"].wall, 1);
  table.row("call by call against PyTorch DDP eager", eager.wall, torch["eager"].wall, 1);
  table.row("graph against PyTorch DDP eager, channels last, algorithms chosen by trying them",
            graph.wall, torch["measured"].wall, 0);
  table.row("graph against PyTorch DDP in a CUDA graph", graph.wall, torch["graph"].wall, 0);
  table.row("same, device time", graph.device, torch["graph"].device, 0);
  table.row("graph against call by call", graph.wall, eager.wall, 0);
  table.write("convnet");
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench convnet: %s\n", error.what());
  return 1;
}

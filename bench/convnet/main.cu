// SPDX-License-Identifier: Apache-2.0
// A training step of example 07's network on one GPU, with SGD with momentum, call by call and as a
// CUDA graph, against the same network in PyTorch's DDP, in one run. Microseconds.
//
//   bench_convnet [ROWS]
#include <cuda_runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comparison_table.hpp"
#include "convnet.cuh"
#include "cudnn_layers.cuh"
#include "load.hpp"
#include "measure.hpp"
#include "resident.cuh"
#include "timing.cuh"
#include "torch_lines.hpp"

namespace {

using namespace bench;

using Network = GpuConvNet<float, CudnnLayers, 1, 28, 32, 64, 10>;

/// By the host's clock, from the first of many steps to the last one's end, and between events on
/// the device.
struct StepTimes {
  Times wall{};
  Times device{};
};

/// One rank that trains, with all it needs, and how long its steps have taken.
template <class... Policies>
class Contender {
 public:
  explicit Contender(const Resident& data) : batch_(data.batch()) {
    ddp_.optimizer().lr = 0.01;
    for (int i = 0; i < 20; ++i) ddp_.step(batch_);  // plans are made, the step is captured
    comm_.synchronize();
  }

  void measure() {
    constexpr int steps = 1000;
    for (int i = 0; i < 10; ++i) ddp_.step(batch_);
    comm_.synchronize();
    const auto start = Clock::now();
    begin_.record(comm_.gpu().stream());
    for (int i = 0; i < steps; ++i) ddp_.step(batch_);
    end_.record(comm_.gpu().stream());
    comm_.synchronize();
    wall_.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() /
                    steps);
    device_.push_back(end_.microseconds_since(begin_) / steps);
  }

  StepTimes times() const { return {summary(wall_), summary(device_)}; }

 private:
  CudaLoopbackCommunicator comm_{std::make_shared<Gpu>(Rank{0}, 0)};
  DistributedDataParallel<Network, Device<Cuda>, World<1>, Optimizer<SGDMomentum>, Policies...>
      ddp_{comm_};
  DeviceBatch<float, std::int32_t> batch_;
  Mark begin_, end_;
  std::vector<double> wall_, device_;
};

/// PyTorch's, by the way it is run. Empty where PyTorch is not installed.
std::map<std::string, StepTimes> torch_steps(std::size_t rows) {
  std::map<std::string, StepTimes> ways;
  each_torch_line(
      "python3 " LOCKSTEP_SOURCE_DIR "/bench/convnet/convnet.py " + std::to_string(rows), 300,
      "convnet", [&](const nlohmann::json& read) {
        const auto times = [&](const char* clock) {
          return Times{true, read[clock]["median"], read[clock]["minimum"]};
        };
        ways[read["way"]] = {times("wall"), times("device")};
      });
  return ways;
}

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
  Contender<> eager(data);
  Contender<CapturedStep> graph(data);
  const auto rounds = [&] {
    for (int round = 0; round < 5; ++round) {
      eager.measure();
      graph.measure();
    }
  };
  rounds();  // PyTorch runs in the middle, so that a machine that drifts favours nobody
  auto torch = torch_steps(rows);
  rounds();
  ComparisonTable table;
  table.row("graph against PyTorch DDP eager", graph.times().wall, torch["eager"].wall, 1);
  table.row("call by call against PyTorch DDP eager", eager.times().wall, torch["eager"].wall, 1);
  table.row("graph against PyTorch DDP eager, channels last, algorithms chosen by trying them",
            graph.times().wall, torch["measured"].wall, 0);
  table.row("graph against PyTorch DDP in a CUDA graph", graph.times().wall, torch["graph"].wall,
            0);
  table.row("same, device time", graph.times().device, torch["graph"].device, 0);
  table.row("graph against call by call", graph.times().wall, eager.times().wall, 0);
  table.write("convnet");
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench convnet: %s\n", error.what());
  return 1;
}

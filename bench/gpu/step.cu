// SPDX-License-Identifier: Apache-2.0
#include "step.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "resident.cuh"
#include "timing.cuh"

namespace bench {
namespace {

constexpr std::size_t rows = 64;
constexpr std::size_t inputs = 784;
constexpr std::size_t classes = 10;

using Network = GpuMlp<float, inputs, 512, classes>;
using ByCublas = GpuMlp<float, inputs, 512, classes, 0>;  // all products by cuBLASLt

/// One rank that trains, with all it needs, and how long its steps have taken.
class Contender {
 public:
  virtual ~Contender() = default;
  virtual void measure() = 0;

  StepTimes times() const { return {summary(wall_), summary(device_)}; }

 protected:
  std::vector<double> wall_;
  std::vector<double> device_;
};

template <class Model, class... Policies>
class Job : public Contender {
 public:
  explicit Job(const Resident& data) : batch_(data.batch()) {
    ddp_.optimizer().lr = 0.01;
    for (int i = 0; i < 20; ++i) ddp_.step(batch_);  // plans are made, the step is captured
    comm_.synchronize();
  }

  void measure() override {
    constexpr int steps = 2000;
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

 private:
  CudaLoopbackCommunicator comm_{std::make_shared<Gpu>(Rank{0}, 0)};
  DistributedDataParallel<Model, Device<Cuda>, World<1>, Policies...> ddp_{comm_};
  DeviceBatch<float, std::int32_t> batch_;
  Mark begin_, end_;
};

template <class TheOptimizer>
std::vector<Comparison> compare(const Resident& data, const std::string& name,
                                const std::string& script) {
  const std::unique_ptr<Contender> contenders[] = {
      std::make_unique<Job<Network, Optimizer<TheOptimizer>>>(data),
      std::make_unique<Job<Network, Optimizer<TheOptimizer>, CapturedStep>>(data),
      std::make_unique<Job<ByCublas, Optimizer<TheOptimizer>, CapturedStep>>(data),
  };
  const auto rounds = [&] {
    for (int round = 0; round < 5; ++round) {
      for (const auto& contender : contenders) contender->measure();
    }
  };
  rounds();  // PyTorch runs in the middle, so that a machine that drifts favours nobody
  auto torch = torch_steps(script);
  rounds();
  const StepTimes eager = contenders[0]->times();
  const StepTimes graph = contenders[1]->times();
  const StepTimes cublas = contenders[2]->times();
  const std::string what = "MLP 784-512-512-10, batch 64, " + name;
  return {
      {what + ": graph against PyTorch DDP eager", graph.wall, torch["eager"].wall, 12},
      {what + ": graph against PyTorch DDP in a graph", graph.wall, torch["graph"].wall, 1.5},
      {"same, device time", graph.device, torch["graph"].device, 0},
      {"same, PyTorch with gradient_as_bucket_view", graph.wall, torch["views"].wall, 0},
      {"same, all products by cuBLASLt", cublas.wall, torch["graph"].wall, 0},
      {what + ": graph against torch.compile", graph.wall, torch["compile"].wall, 0},
      {"same, reduce-overhead", graph.wall, torch["overhead"].wall, 0},
      {what + ": call by call against PyTorch DDP eager", eager.wall, torch["eager"].wall, 0},
      {what + ": graph against call by call", graph.wall, eager.wall, 0},
  };
}

}  // namespace

std::vector<Comparison> compare_steps() {
  const Resident data(rows, inputs, classes);
  auto result = compare<SGD>(data, "SGD", "sgd");
  for (auto& row : compare<AdamW>(data, "AdamW", "adamw")) result.push_back(std::move(row));
  return result;
}

}  // namespace bench

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file One rank that trains on a GPU, and how long its steps take beside PyTorch's.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "measure.hpp"
#include "resident.cuh"
#include "step_times.hpp"
#include "timing.cuh"

namespace bench {

/// One rank with all it needs to train `Model` with these policies, and how long its steps have
/// taken.
template <class Model, class... Policies>
class Contender {
 public:
  explicit Contender(const Resident& data) : batch_(data.batch()) {
    ddp_.optimizer().lr = 0.01;
    for (int i = 0; i < 20; ++i) ddp_.step(batch_);  // plans are made, the step is captured
    comm_.synchronize();
  }

  void measure(int steps) {
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
  DistributedDataParallel<Model, Device<Cuda>, World<1>, Policies...> ddp_{comm_};
  DeviceBatch<float, std::int32_t> batch_;
  Mark begin_, end_;
  std::vector<double> wall_, device_;
};

/// Contenders take turns of `steps` each, and PyTorch, as `torch()` measures it, runs in the
/// middle, so that a machine that drifts favours nobody. Returns PyTorch's times.
template <class Torch, class... Contenders>
std::map<std::string, StepTimes> measure_beside(const Torch& torch, int steps,
                                                Contenders&... contenders) {
  const auto rounds = [&] {
    for (int round = 0; round < 5; ++round) (contenders.measure(steps), ...);
  };
  rounds();
  auto ways = torch();
  rounds();
  return ways;
}

}  // namespace bench

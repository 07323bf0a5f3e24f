// SPDX-License-Identifier: Apache-2.0
#include "step.hpp"

#include <cstddef>
#include <utility>

#include "contender.cuh"
#include "resident.cuh"

namespace bench {
namespace {

constexpr std::size_t rows = 64;
constexpr std::size_t inputs = 784;
constexpr std::size_t classes = 10;

using Network = GpuMlp<float, inputs, 512, classes>;
using ByCublas = GpuMlp<float, inputs, 512, classes, 0>;  // all products by cuBLASLt

template <class TheOptimizer>
std::vector<Comparison> compare(const Resident& data, const std::string& name,
                                const std::string& script) {
  using O = Optimizer<TheOptimizer>;
  Contender<Network, O> by_calls(data);
  Contender<Network, O, CapturedStep> captured(data);
  Contender<ByCublas, O, CapturedStep> by_cublas(data);
  auto torch = measure_beside([&] { return torch_ways("gpu/step.py " + script, "step"); }, 2000,
                              by_calls, captured, by_cublas);
  const StepTimes eager = by_calls.times();
  const StepTimes graph = captured.times();
  const StepTimes cublas = by_cublas.times();
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

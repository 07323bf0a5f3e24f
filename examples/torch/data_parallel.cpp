// SPDX-License-Identifier: Apache-2.0
// An ordinary LibTorch program in one process whose module has replicas, each with its share of a
// batch: PyTorch's DataParallel. Nothing is launched.
//
//   ./data_parallel                on all GPUs; without any, one replica
//   ./data_parallel --replicas 4   four replicas on one device, as a trial, or to use more cores
#include <torch/cuda.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <cstdio>
#include <exception>
#include <memory>

#include "lockstep/torch.hpp"

/// Replicas are copies, which `torch::nn::Cloneable` makes of modules with a `reset`.
struct Net : torch::nn::Cloneable<Net> {
  torch::nn::Linear first{nullptr}, last{nullptr};

  Net() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(2, 32));
    last = register_module("last", torch::nn::Linear(32, 1));
  }
  torch::Tensor forward(torch::Tensor x) { return last->forward(torch::tanh(first->forward(x))); }
};

int main(int argc, char** argv) try {
  lockstep::ProgramOptions options(argc, argv);
  const auto replicas = options.option("replicas", 0u, "0: one for each GPU");
  if (options.finish()) return 0;  // --help

  torch::manual_seed(1);
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  const auto net = std::make_shared<Net>();
  net->to(device);
  // The line that one device would not need. Outputs are on the module's device, unless another
  // one is given: dp(net, devices, output_device).
  using Dp = lockstep::torch::DataParallel<Net>;
  const auto dp = replicas == 0 ? std::make_unique<Dp>(net) : std::make_unique<Dp>(net, replicas);
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);

  torch::manual_seed(2);  // each copy has drawn numbers too, and any number is to train alike
  // Points on the unit square, and the height of a hill over each.
  const torch::Tensor points = torch::rand({4096, 2});
  const torch::Tensor heights = torch::exp(-8 * (points - 0.5).square().sum(1, true));
  double loss = 0;
  for (int epoch = 1; epoch <= 5; ++epoch) {
    loss = 0;
    const torch::Tensor order = torch::randperm(4096);
    const auto batches = order.split(64);
    for (const torch::Tensor& batch : batches) {
      const torch::Tensor outputs = dp->forward(points.index_select(0, batch));
      const torch::Tensor targets = heights.index_select(0, batch).to(outputs.device());
      const torch::Tensor error = torch::mse_loss(outputs, targets);
      error.backward();  // the module's gradients are those of the whole batch
      optimizer.step();
      optimizer.zero_grad();
      loss += error.item<double>() / static_cast<double>(batches.size());
    }
    std::printf("epoch %d, %zu replicas: loss %.5f\n", epoch, dp->replicas(), loss);
  }
  return loss < 0.05 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

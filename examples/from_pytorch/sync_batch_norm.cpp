// SPDX-License-Identifier: Apache-2.0
// ./sync_batch_norm --ranks 2
#include <torch/torch.h>

#include <cstdio>

#include "lockstep/torch.hpp"

using torch::nn::Sequential;

void train(lockstep::Session& session) {
  const std::size_t rank = session.rank().value(), world_size = session.world().value();
  torch::manual_seed(1);
  const torch::nn::BatchNorm1d norm(16);
  Sequential net(torch::nn::Linear(10, 16), norm, torch::nn::Linear(16, 1));
  lockstep::convert_sync_batchnorm(net);
  lockstep::torch::DistributedDataParallel ddp(net, session);
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  const auto x = torch::randn({64, 10}, at::make_generator<at::CPUGeneratorImpl>(0));
  const torch::Tensor inputs = x.chunk(world_size)[rank];
  const torch::Tensor labels = inputs.sum(1, true);
  for (int step = 0; step != 10; ++step) {
    optimizer.zero_grad();
    torch::mse_loss(ddp(inputs), labels).backward();
    optimizer.step();
  }
  if (rank != 0) return;
  std::printf("weight %.9g\n", net->parameters()[0].norm().item<double>());
  std::printf("running_mean %.9g\n", norm->running_mean.norm().item<double>());
  std::printf("running_var %.9g\n", norm->running_var.norm().item<double>());
}

int main(int argc, char** argv) { return lockstep::launch(argc, argv, train); }

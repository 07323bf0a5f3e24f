// SPDX-License-Identifier: Apache-2.0
// ./log_loss --ranks 2
#include <torch/torch.h>

#include <cstdio>

#include "lockstep/torch.hpp"

void train(lockstep::Session& session) {
  lockstep::ProcessGroup group(session);
  const std::size_t rank = group.rank().value(), world_size = group.world_size().value();
  torch::manual_seed(1);
  torch::nn::Linear net(10, 1);
  lockstep::torch::DistributedDataParallel ddp(net, group);
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  const auto x = torch::randn({64, 10}, at::make_generator<at::CPUGeneratorImpl>(0));
  const torch::Tensor inputs = x.chunk(world_size)[rank];
  for (int step = 0; step != 10; ++step) {
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(ddp(inputs), inputs.sum(1, true));
    loss.backward();
    optimizer.step();
    const auto sum = group->reduce(loss.item<float>(), lockstep::Rank{0});  // on rank 0
    if (rank == 0) std::printf("step %d loss %.9g\n", step, sum / static_cast<double>(world_size));
  }
}

int main(int argc, char** argv) { return lockstep::launch(argc, argv, train); }

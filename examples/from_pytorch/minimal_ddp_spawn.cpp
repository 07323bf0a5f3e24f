// SPDX-License-Identifier: Apache-2.0
// ./minimal_ddp_spawn
#include <torch/torch.h>

#include <cstdio>

#include "lockstep/torch.hpp"

void train(const lockstep::Membership& member, lockstep::Store& store) {
  auto comm = lockstep::make_shm_communicator(member, store);  // no address, no port
  const std::size_t rank = comm.rank().value(), world_size = comm.world_size().value();
  const auto x = torch::randn({64, 10}, at::make_generator<at::CPUGeneratorImpl>(0));
  const torch::Tensor inputs = x.chunk(world_size)[rank];
  const torch::Tensor labels = inputs.sum(1, true);
  torch::manual_seed(1);
  torch::nn::Linear net(10, 1);
  lockstep::torch::DistributedDataParallel ddp(net, comm);
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  for (int step = 0; step != 10; ++step) {
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(ddp(inputs), labels);
    loss.backward();
    optimizer.step();
    if (rank == 0) std::printf("step %d loss %.9g\n", step, loss.item<double>());
  }
}

int main() {
  lockstep::spawn<2>(lockstep::AsProcesses{}, train);
  return 0;
}
